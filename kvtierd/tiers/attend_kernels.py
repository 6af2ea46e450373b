"""Kernels that a sequence will need, loaded or compiled when it is opened, so that no request waits for a compiler.

On the CPU they are loaded with the module that has them, and there is nothing to do here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvtierd.core.geometry import Geometry
from kvtierd.core.progress import Progress
from kvtierd.gpu.attend import AttentionDevice
from kvtierd.gpu.device import DeviceError
from kvtierd.tiers.attend_turns import NICENESS
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.workers import Workers

_log = logging.getLogger(__name__)


class Preparation:
    """Has a device prepare for namespaces, in a thread of its own; requests that come earlier wait for it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._pool: Workers | None = None
        self._under_way: dict[tuple[Geometry, bool], asyncio.Task[None]] = {}

    async def ready(self, device: AttentionDevice, entry: NamespaceEntry) -> None:
        """Return when everything is there for blocks of a namespace. Raises DeviceError."""
        key = entry.geometry, entry.allow_loss
        task = self._under_way.get(key)
        if task is None:
            steps = device.to_prepare(entry.geometry, lossy=entry.allow_loss)
            if not steps:
                return
            task = self._under_way[key] = asyncio.create_task(self._run(steps))
            task.add_done_callback(lambda done: self._ended(key, done))
        await asyncio.shield(task)

    async def close(self) -> None:
        """Wait for what is under way, and end the thread."""
        while self._under_way:
            await asyncio.wait(list(self._under_way.values()))
        if self._pool is not None:
            self._pool.close()

    async def _run(self, steps: list[Callable[[], None]]) -> None:
        if self._pool is None:
            self._pool = Workers(1, "kvtierd-kernels", self._progress, NICENESS)
        for step in steps:
            await self._pool.run(step)

    def _ended(self, key: tuple[Geometry, bool], task: asyncio.Task[None]) -> None:
        del self._under_way[key]
        if not task.cancelled() and isinstance(error := task.exception(), DeviceError):
            _log.warning("attention is not ready; the next request tries again: %s", error)
