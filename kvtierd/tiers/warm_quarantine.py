"""Slots that clients of the daemon's life before may still write: out of use until their processes are gone.

A client that was writing when the daemon ended has the memory mapped, and may be paused. That its process has ended is
told by a pidfd, which is kept with the memory: a process number alone could be another's by now.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from typing import Final

import numpy as np

from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.tiers.warm_host import PROCESS, WarmHostTier
from kvtierd.tiers.warm_takeover import Found

_BEFORE: Final = 0
"""Stands for the sessions of the life before among those of a process: they end with the process."""


class Quarantine:
    """Holds such slots and watches the processes. Everything runs on the loop."""

    def __init__(self, host: WarmHostTier) -> None:
        self._host = host
        self._watched: dict[int, list[tuple[SlotClass, Slots]]] = {}
        """Slots by the pidfd of the process that may write them."""

    @property
    def slots(self) -> int:
        """How many are out of use."""
        return sum(slots.size for groups in self._watched.values() for _, slots in groups)

    def hold(self, lent: list[Found], processes: list[tuple[int, int]]) -> list[Slots]:
        """Hold what processes that live may write; the slots that are held so.

        `processes` are (pid, pidfd); the descriptors become the quarantine's.
        """
        pidfds: dict[int, list[int]] = {}
        for pid, pidfd in processes:
            pidfds.setdefault(pid, []).append(pidfd)
        for found in lent:
            for pid in np.unique(found.rows[:, 0]).tolist():
                if (pidfd := self._living(pid, pidfds)) >= 0:
                    slots = found.slots[found.rows[:, 0] == pid]
                    self._host.take(found.cls, slots)
                    self._watched.setdefault(pidfd, []).append((found.cls, slots))
        for pid, fds in pidfds.items():
            self._watch(pid, fds)
        return [slots for groups in self._watched.values() for _, slots in groups]

    def close(self) -> None:
        """Stop watching."""
        for pidfd in list(self._watched):
            self._unwatch(pidfd)

    def _living(self, pid: int, pidfds: dict[int, list[int]]) -> int:
        """A pidfd of a process of the life before that has not ended, -1 for none.

        Where none was passed it is asked for by its number: should that be another's by now, the slots wait longer
        than they need to, which is the safe side.
        """
        if pid not in pidfds:
            with contextlib.suppress(OSError):
                pidfds[pid] = [os.pidfd_open(pid)]
                self._host.keeper.keep(f"{PROCESS}{pid}", pidfds[pid][0])
        return next((fd for fd in pidfds.get(pid, ()) if not _has_ended(fd)), -1)

    def _watch(self, pid: int, pidfds: list[int]) -> None:
        for fd in pidfds:
            if fd in self._watched:
                asyncio.get_running_loop().add_reader(fd, self._process_gone, pid, fd)
                self._host.writers_of(pid).add(_BEFORE)
            else:
                os.close(fd)
        if not any(fd in self._watched for fd in pidfds):
            self._host.keeper.forget(f"{PROCESS}{pid}")

    def _process_gone(self, pid: int, pidfd: int) -> None:
        for cls, slots in self._watched[pidfd]:
            self._host.release(cls, slots)
        self._unwatch(pidfd)
        self._host.writer_gone_of(pid, _BEFORE)

    def _unwatch(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        del self._watched[pidfd]
        os.close(pidfd)


def _has_ended(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
