"""An engine's KV cache on a device: pages are gathered there, cross to pinned memory in one copy, and go into slots
from there; and back. Both directions have memory and a stream of their own, so that a store and a load do not wait for
each other.

Where the device is the host itself, the same goes without streams: that is how it is tested without a GPU.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvtierd.connectors.vllm_pages import EnginePages
from kvtierd.core.checksum import Bytes, Sums
from kvtierd.core.geometry import Geometry
from kvtierd.core.units import MIB

STAGING_BYTES = 32 * MIB
"""Pinned, and as much on the device, for each direction."""


class DevicePages:
    """Implements `Pages`. `layers[l]` is an integer tensor [pages, words], each page contiguous, on one device."""

    def __init__(self, geometry: Geometry, layers: Sequence[Any]) -> None:
        self._out = _Lane(geometry, layers)
        self._in = _Lane(geometry, layers)

    def fence(self) -> Any:
        """An event on the engine's stream."""
        return self._out.mark()

    def store(self, pages: Sequence[int], slots: Sequence[Bytes], sums: Sums, fence: Any) -> None:
        """As `Pages.store`."""
        lane = self._out
        for begin, end in lane.pieces(len(pages)):
            lane.fetch(pages[begin:end], fence)
            lane.staged.store(range(end - begin), slots[begin:end], sums[begin:end])

    def load(self, pages: Sequence[int], slots: Sequence[Bytes], sums: Sums, fence: Any) -> int:
        """As `Pages.load`."""
        lane, done = self._in, 0
        for begin, end in lane.pieces(len(pages)):
            good = lane.staged.load(range(end - begin), slots[begin:end], sums[begin:end])
            lane.send(pages[begin : begin + good], fence)
            done += good
            if good < end - begin:
                break
        return done

    def close(self) -> None:
        """As `Pages.close`."""
        for lane in (self._in, self._out):
            lane.staged.close()


class _Lane:
    """Memory for some pages of all layers, here and on the device, and a stream to move them on; for one thread."""

    def __init__(self, geometry: Geometry, layers: Sequence[Any]) -> None:
        self._layers = list(layers)
        first = self._layers[0]
        self._device = first.device
        self._cuda = self._device.type == "cuda"
        self._room = max(1, STAGING_BYTES // geometry.block_bytes)
        shape = (len(self._layers), self._room, first.shape[1])
        self._there = torch.empty(shape, dtype=first.dtype, device=self._device)
        self._here = torch.empty(shape, dtype=first.dtype, pin_memory=self._cuda)
        self._stream = torch.cuda.Stream(self._device) if self._cuda else None
        self._busy = threading.Lock()
        whole = self._here.view(torch.uint8).numpy()
        self.staged = EnginePages(geometry, list(whole))

    def pieces(self, count: int) -> Iterator[tuple[int, int]]:
        """Ranges of so many pages as there is room for."""
        for begin in range(0, count, self._room):
            yield begin, min(begin + self._room, count)

    def mark(self) -> Any:
        """An event behind what the engine's current stream has been given so far."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def fetch(self, pages: Sequence[int], fence: Any) -> None:
        """Gather pages and bring them here; returns when they are."""
        count = len(pages)
        with self._behind(fence):
            index = torch.tensor(list(pages), dtype=torch.int64, device=self._device)
            for layer, room in zip(self._layers, self._there, strict=True):
                torch.index_select(layer, 0, index, out=room[:count])
            self._here[:, :count].copy_(self._there[:, :count], non_blocking=True)

    def send(self, pages: Sequence[int], fence: Any) -> None:
        """Send pages that are here and scatter them; returns when they are there."""
        count = len(pages)
        with self._behind(fence):
            self._there[:, :count].copy_(self._here[:, :count], non_blocking=True)
            index = torch.tensor(list(pages), dtype=torch.int64, device=self._device)
            for layer, room in zip(self._layers, self._there, strict=True):
                layer.index_copy_(0, index, room[:count])

    @contextlib.contextmanager
    def _behind(self, fence: Any) -> Iterator[None]:
        """Work on our stream, behind the fence, to its end."""
        with self._busy, torch.inference_mode():
            if self._stream is None:
                yield
                return
            with torch.cuda.stream(self._stream):
                if fence is not None:
                    self._stream.wait_event(fence)
                yield
            self._stream.synchronize()
