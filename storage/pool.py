"""The store's I/O threads: as many requests in flight as there are threads, reads before writes.

A pool of our own, because an executor has one queue: a read would wait behind all of a write-behind's backlog.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from kvtierd.core.progress import Progress
from kvtierd.storage.buffers import Scratch

T = TypeVar("T")

PATIENCE = 4
"""Every so many jobs a patient one goes first if it waits, so that endless reads do not stop the writes."""


class _Job(Generic[T]):
    __slots__ = ("call", "future")

    def __init__(self, call: Callable[[Scratch], T], future: asyncio.Future[T]) -> None:
        self.call = call
        self.future = future

    def run(self, scratch: Scratch) -> None:
        """Call and hand the outcome, whatever it is, to the loop."""
        loop = self.future.get_loop()
        try:
            result = self.call(scratch)
        except BaseException as error:  # noqa: BLE001 - it is raised again where the future is awaited
            loop.call_soon_threadsafe(self._fail, error)
        else:
            loop.call_soon_threadsafe(self._succeed, result)

    def _succeed(self, result: T) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def _fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class IoPool:
    """`threads` daemon threads, each with its Scratch. Submit from the loop; close when nothing is in flight.

    `progress` counts the jobs, and may be shared with whoever watches over the disk.
    """

    def __init__(self, threads: int, progress: Progress | None = None) -> None:
        self._progress = progress or Progress()
        self._urgent: deque[_Job[Any]] = deque()
        self._patient: deque[_Job[Any]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._turn = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"kvtierd-io-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[Scratch], T], *, urgent: bool) -> asyncio.Future[T]:
        """Run `call(scratch)` in a thread; urgent jobs overtake patient ones."""
        job = _Job(call, asyncio.get_running_loop().create_future())
        with self._wake:
            if self._closed:
                raise RuntimeError("the I/O threads have ended")
            (self._urgent if urgent else self._patient).append(job)
            self._wake.notify()
        self._progress.begun += 1
        job.future.add_done_callback(self._ended)
        return job.future

    def _ended(self, _future: object) -> None:
        self._progress.ended += 1

    def close(self) -> None:
        """Run what was submitted, then end the threads."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        scratch = Scratch()
        while (job := self._next()) is not None:
            job.run(scratch)
            del job  # a job holds its caller's buffers, and the next may be long in coming

    def _next(self) -> _Job[Any] | None:
        with self._wake:
            while not (self._urgent or self._patient):
                if self._closed:
                    return None
                self._wake.wait()
            self._turn += 1
            patient_first = self._turn % PATIENCE == 0 or not self._urgent
            queue = self._patient if patient_first and self._patient else self._urgent
            return queue.popleft()
