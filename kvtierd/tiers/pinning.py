"""Host's chunks are pinned for the device of the gpu tier, in the background, and unpinned before they go.

Pinning takes some 10 ms for 64 MiB in which the driver does nothing else, so it comes after the daemon is ready, one
piece after the other; copies go on meanwhile, and are faster where their memory is pinned by then. Where pinning is not
allowed, the device's advice is logged once, and copies stay as they are.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from kvtierd.core.checksum import Bytes
from kvtierd.core.errors import KvtierdError
from kvtierd.gpu import Device
from kvtierd.protocol.service import Session
from kvtierd.tiers.arena import Chunk
from kvtierd.tiers.gpu_tier import GpuTier
from kvtierd.tiers.workers import Workers

_log = logging.getLogger(__name__)
_END = -1


class Pinning:
    """Does what the device wants to have done about chunks and clients, one thing after the other, in threads."""

    def __init__(self, gpu: GpuTier | None, workers: Workers) -> None:
        self._device: Device | None = gpu.device if gpu is not None else None
        self._workers = workers
        self._memory: dict[int, Bytes] = {}
        """By number: memory of chunks that are pinned, or will be. A mapping goes with its last view, so this one
        keeps it until it is unpinned."""
        self._refused = False
        self._last: asyncio.Task[None] | None = None

    def came(self, chunk: Chunk) -> None:
        """A chunk is there: pin it, unless that is done or was refused before."""
        if self._device is None or self._refused or chunk.number in self._memory:
            return
        self._memory[chunk.number] = chunk.memory
        self._then(functools.partial(self._pin, self._device, chunk.number))

    def gone(self, chunk: Chunk) -> None:
        """A chunk is about to be closed: unpin it, whatever of it is pinned."""
        memory = self._memory.pop(chunk.number, None)
        if self._device is not None and memory is not None:
            self._then(functools.partial(self._in_thread, self._device.unregister_host, memory))

    def client_gone(self, session: Session) -> None:
        """A client has ended: let go of device memory of its own that it had exported to us."""
        if self._device is not None and self._device.has_client(str(session.id)):
            self._then(functools.partial(self._in_thread, self._device.close_client, str(session.id)))

    async def close(self) -> None:
        """Unpin everything. Nothing may copy any more."""
        for number in list(self._memory):
            memory = self._memory.pop(number)
            if self._device is not None:
                self._then(functools.partial(self._in_thread, self._device.unregister_host, memory))
        await self.settled()

    async def settled(self) -> None:
        """Wait until all that was begun is done."""
        while self._last is not None and not self._last.done():
            await asyncio.wait([self._last])

    def _then(self, work: Callable[[], Any]) -> None:
        self._last = asyncio.create_task(self._after(self._last, work), name="pinning")

    async def _after(self, before: asyncio.Task[None] | None, work: Callable[[], Any]) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            await work()
        except KvtierdError as error:
            _log.warning("%s", error)

    async def _in_thread(self, call: Callable[[Any], Any], argument: Any) -> None:
        await self._workers.run(functools.partial(call, argument))

    async def _pin(self, device: Device, number: int) -> None:
        memory = self._memory.get(number)
        if memory is None or self._refused:
            return
        try:
            pieces: Iterator[int] = iter(device.register_pieces(memory))
            while number in self._memory and await self._workers.run(functools.partial(next, pieces, _END)) != _END:
                pass
        except KvtierdError:
            self._refused = True
            await self._workers.run(functools.partial(device.unregister_host, memory))
            self._memory.pop(number, None)
            raise
