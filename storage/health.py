"""Whether the disk takes writes: a full, failing, read-only or vanished disk is a state, reported, and left by itself.

A write that the disk refuses makes the tier degraded. It then takes no stores, so that nobody waits for a disk that is
not there; what is stored is read as before. Before the next store, and now and then, the disk is tried: when it takes
files, pages and syncs again, the tier works again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvtierd.core.clock import Clock
from kvtierd.core.errors import StorageError
from kvtierd.storage.interface import DiskError
from kvtierd.storage.metadata import MetadataFiles

_log = logging.getLogger(__name__)

WATCH_S = 1.0
"""How often the directory is looked for, and a degraded disk tried."""
TRIAL_NAME = "trial"


class Health:
    """`cause` is why the tier is degraded, "" while it works. `try_data` writes through the engine of the segments."""

    def __init__(
        self,
        directory: Path,
        files: MetadataFiles,
        try_data: Callable[[], Awaitable[None]],
        clock: Clock,
        counters: Counter[str],
    ) -> None:
        self._directory = directory
        self._files = files
        self._try_data = try_data
        self._clock = clock
        self._counters = counters
        self._identity = _identity(directory)
        self._since_ns = 0
        self._trying = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._trial: asyncio.Task[object] | None = None
        self.cause = ""

    def start(self) -> None:
        """Begin to watch."""
        self._timer = asyncio.get_running_loop().call_later(WATCH_S, self._look)

    async def close(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._trial is not None:
            await asyncio.wait([self._trial])

    def note(self, error: BaseException | None) -> None:
        """An operation has ended so; what the disk refused makes the tier degraded."""
        if isinstance(error, DiskError):
            self._degrade(str(error))

    def suspect(self) -> None:
        """A read failed: that may be one bad sector, or the whole disk. Try it, beside everything else."""
        if not self.cause and (self._trial is None or self._trial.done()):
            self._trial = asyncio.create_task(self._try(), name="nvme-trial")

    async def _try(self) -> None:
        async with self._trying:
            if not self.cause and (problem := await self._problem()):
                self._degrade(problem)

    async def works(self) -> bool:
        """Whether stores are taken; a degraded disk is tried first."""
        if not self.cause:
            return True
        async with self._trying:
            if self.cause and not (problem := await self._problem()):
                self._restore()
            elif self.cause:
                self.cause = problem
        return not self.cause

    def _degrade(self, cause: str) -> None:
        if not self.cause:
            self._since_ns = self._clock.now_ns()
            self._counters["degradations"] += 1
            _log.warning("the nvme tier is degraded: %s; it takes no stores until the disk does", cause)
        self.cause = cause

    def _restore(self) -> None:
        seconds = (self._clock.now_ns() - self._since_ns) / 1e9
        _log.info("the nvme tier works again after %.0f s (%s)", seconds, self.cause)
        self.cause = ""

    async def _problem(self) -> str:
        """Try the disk; "" when all is well."""
        if problem := self._directory_problem():
            return problem
        try:
            await self._files.replace(TRIAL_NAME, [b"kvtierd"])
            await self._files.remove([TRIAL_NAME])
            await self._try_data()
        except OSError as error:
            return f"cannot write in {self._directory}: {error.strerror or error}"
        except StorageError as error:
            return str(error)
        return ""

    def _directory_problem(self) -> str:
        """A mount that is gone leaves another directory, or none: what was open would go on, what is new would go to
        the wrong place."""
        found = _identity(self._directory)
        if found is None:
            return f"{self._directory} has vanished"
        return "" if found == self._identity else f"another directory lies at {self._directory}: its mount is gone"

    def _look(self) -> None:
        self.start()
        if self.cause and (self._trial is None or self._trial.done()):
            self._trial = asyncio.create_task(self.works(), name="nvme-trial")
        elif not self.cause and (problem := self._directory_problem()):
            self._degrade(problem)


def _identity(directory: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = os.stat(directory)  # noqa: PTH116 - a path that is no directory any more is no error here
        return found.st_dev, found.st_ino
    return None
