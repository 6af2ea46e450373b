"""An engine's KV cache in host memory as pages, and copies between pages and slots. No engine in here.

A *page* is what the engine keeps of one block in one layer: one run of bytes, opaque to us. A slot holds the pages of
all layers, each padded to 4 KiB and with a checksum of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import xxhash

from kvtierd.core.checksum import PIECE_BYTES, Bytes, Sums
from kvtierd.core.geometry import Geometry
from kvtierd.protocol.copying import Copier, default_threads


class Pages(Protocol):
    """An engine's cache, wherever it lies. Thread-safe for one thread that stores beside one that loads."""

    def fence(self) -> Any:
        """A point in the engine's work: what was begun before has ended when a store or load given this begins. Called
        from the engine's own thread."""

    def store(self, pages: Sequence[int], slots: Sequence[Bytes], sums: Sums, fence: Any) -> None:
        """Copy pages of all layers into slots ([slot_bytes] uint8), zero their padding, and hash what landed into
        `sums` ([n, layers])."""

    def load(self, pages: Sequence[int], slots: Sequence[Bytes], sums: Sums, fence: Any) -> int:
        """Copy slots into pages of all layers; how many leading ones match their sums. Pages behind these hold bytes
        of no use."""

    def close(self) -> None:
        """End copying threads; no load is under way, and none follows."""


class EnginePages:
    """Pages of all layers: `layers[l]` is [pages, page_bytes] uint8, writable, each page contiguous.

    Where all layers lie in `storage` at equal distances, pages of several layers are copied in one call. Raises
    ValueError when a page has not the size that the geometry says.
    """

    def __init__(self, geometry: Geometry, layers: Sequence[Bytes]) -> None:
        if len(layers) != geometry.layers:
            raise ValueError(f"the cache has {len(layers)} layers; the geometry has {geometry.layers}")
        for number, layer in enumerate(layers):
            if layer.dtype != np.uint8 or layer.ndim != 2 or layer.shape[1] != geometry.layer_bytes:
                wanted = f"uint8 [pages, {geometry.layer_bytes}] is wanted"
                raise ValueError(f"layer {number} is {layer.dtype} {layer.shape}; {wanted}")
            if layer.strides[1] != 1:
                raise ValueError(f"the pages of layer {number} are not contiguous")
        self._geometry = geometry
        self.layers = list(layers)
        self._joined = _joined(self.layers)
        # A request waits for its load, and nobody for a save: that leaves the other cores to the engine.
        self._loader = Copier(default_threads())
        self._group = max(1, PIECE_BYTES // geometry.layer_bytes)

    def fence(self) -> None:
        """In host memory the engine's work has ended when it says so."""

    def store(self, pages: Sequence[int], slots: Sequence[Bytes], sums: Sums, fence: Any = None) -> None:  # noqa: ARG002
        """As `Pages.store`."""
        for page, slot, row in zip(pages, slots, sums, strict=True):
            self._store(page, slot, row)

    def load(self, pages: Sequence[int], slots: Sequence[Bytes], sums: Sums, fence: Any = None) -> int:  # noqa: ARG002
        """As `Pages.load`."""
        whole = np.zeros(len(pages), np.bool_)

        def load(i: int) -> None:
            whole[i] = self._load(pages[i], slots[i], sums[i])

        self._loader.spread(load, len(pages), self._geometry)
        return int(np.argmin(np.append(whole, False)))

    def close(self) -> None:
        """End the copying threads."""
        self._loader.close()

    def _store(self, page: int, slot: Bytes, sums: Sums) -> None:
        rows = self._rows(slot)
        size = self._geometry.layer_bytes
        rows[:, size:] = 0
        for begin in range(0, self._geometry.layers, self._group):
            end = min(begin + self._group, self._geometry.layers)
            if self._joined is not None:
                rows[begin:end, :size] = self._joined[begin:end, page]
            else:
                for layer in range(begin, end):
                    rows[layer, :size] = self.layers[layer][page]
            for layer in range(begin, end):
                sums[layer] = xxhash.xxh3_64_intdigest(rows[layer, :size].data)

    def _load(self, page: int, slot: Bytes, sums: Sums) -> bool:
        rows = self._rows(slot)
        size = self._geometry.layer_bytes
        for begin in range(0, self._geometry.layers, self._group):
            end = min(begin + self._group, self._geometry.layers)
            if self._joined is not None:
                self._joined[begin:end, page] = rows[begin:end, :size]
            else:
                for layer in range(begin, end):
                    self.layers[layer][page] = rows[layer, :size]
            for layer in range(begin, end):
                if xxhash.xxh3_64_intdigest(self.layers[layer][page].data) != int(sums[layer]):
                    return False
        return True

    def _rows(self, slot: Bytes) -> Bytes:
        return slot.reshape(self._geometry.layers, self._geometry.layer_stride)


def _joined(layers: Sequence[Bytes]) -> Bytes | None:
    """[layers, pages, page_bytes] over the same memory, where all layers are views of one array at equal distances."""
    first = layers[0]
    if first.base is None or any(layer.base is not first.base or layer.shape != first.shape for layer in layers):
        return None
    starts = [layer.ctypes.data for layer in layers]
    steps = set(np.diff(starts).tolist()) or {0}
    if len(steps) != 1 or any(layer.strides != first.strides for layer in layers):
        return None
    return np.lib.stride_tricks.as_strided(first, (len(layers), *first.shape), (steps.pop(), *first.strides))
