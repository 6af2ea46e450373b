"""Slots that clients of the daemon's life before may still write: out of use until their processes are gone.

A client that was writing when the daemon ended has the memory mapped, and may be paused. That its process has ended is
told by a pidfd, which is kept with the memory: a process number alone could be another's by now. A client that goes on
gives its reservations back by itself, with the token of the session that had them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from typing import Final

import numpy as np

from kvtierd.gpu.slot_pool import Slots
from kvtierd.protocol.sessions import TOKEN_BYTES
from kvtierd.tiers.warm_host import PROCESS, WarmHostTier
from kvtierd.tiers.warm_takeover import Found

_BEFORE: Final = 0
"""Stands for the sessions of the life before among those of a process: they end with the process."""


class Quarantine:
    """Holds such slots and watches the processes. Everything runs on the loop."""

    def __init__(self, host: WarmHostTier) -> None:
        self._host = host
        self._watched: dict[int, list[Found]] = {}
        """Slots, and the rows that say who was lent them, by the pidfd of the process that may write them."""
        self._pids: dict[int, int] = {}
        """Processes by their pidfds."""

    @property
    def slots(self) -> int:
        """How many are out of use."""
        return sum(found.slots.size for groups in self._watched.values() for found in groups)

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
                    mine = found.of(found.rows[:, 0] == pid)
                    self._host.take(mine.cls, mine.slots)
                    self._watched.setdefault(pidfd, []).append(mine)
        for pid, fds in pidfds.items():
            self._watch(pid, fds)
        return [found.slots for groups in self._watched.values() for found in groups]

    def given_back(self, token: bytes, reservation: int) -> None:
        """The client that had this token in an earlier life says that it does not write a reservation any more."""
        if len(token) != TOKEN_BYTES:
            return
        owner = np.array([reservation, *np.frombuffer(token, "<u8")], np.uint64)
        for pidfd, groups in list(self._watched.items()):
            kept = []
            for found in groups:
                mine = (found.rows[:, 1:4] == owner).all(axis=1)
                self._host.release(found.cls, found.slots[mine])
                if not mine.all():
                    kept.append(found.of(~mine))
            self._watched[pidfd] = kept
            if not kept:
                self._end(pidfd)

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
                self._pids[fd] = pid
                asyncio.get_running_loop().add_reader(fd, self._process_gone, fd)
                self._host.writers_of(pid).add(_BEFORE)
            else:
                os.close(fd)
        if not any(fd in self._watched for fd in pidfds):
            self._host.keeper.forget(f"{PROCESS}{pid}")

    def _process_gone(self, pidfd: int) -> None:
        for found in self._watched[pidfd]:
            self._host.release(found.cls, found.slots)
        self._end(pidfd)

    def _end(self, pidfd: int) -> None:
        pid = self._pids[pidfd]
        self._unwatch(pidfd)
        if pid not in self._pids.values():
            self._host.writer_gone_of(pid, _BEFORE)

    def _unwatch(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        del self._watched[pidfd], self._pids[pidfd]
        os.close(pidfd)


def _has_ended(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
