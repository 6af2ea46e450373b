"""The store's I/O threads: reads before writes, no more requests at the device than it can use (storage/turns.py).

A pool of our own, because an executor has one queue: a read would wait behind all of a write-behind's backlog. What a
request needs of the processor, its checksums, happens while others have the device.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from kvtierd.core.progress import Progress
from kvtierd.storage.buffers import Scratch
from kvtierd.storage.turns import Lane, Turns

T = TypeVar("T")

Step = Callable[[Scratch], Any]


def _nothing(_: Scratch) -> None:
    """The step of a job that has none."""


@dataclasses.dataclass(slots=True, eq=False)
class _Job:
    """`before` and `after` want a thread, `transfer` wants the device too if there is a `lane`."""

    future: asyncio.Future[Any]
    transfer: Step
    lane: Lane | None = None
    size_bytes: int = 0
    before: Step = _nothing
    after: Step = _nothing
    result: Any = None

    def finish(self, error: BaseException | None) -> None:
        """Hand the outcome, whatever it is, to the loop."""
        self.future.get_loop().call_soon_threadsafe(self._settle, error)

    def _settle(self, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(error)


class IoPool:
    """`threads` daemon threads, each with its Scratch. Submit from the loop; close when nothing is in flight.

    `progress` counts the jobs, and may be shared with whoever watches over the disk.
    """

    def __init__(self, threads: int, progress: Progress | None = None) -> None:
        self._progress = progress or Progress()
        self._plain: deque[_Job] = deque()
        self._lanes: tuple[deque[_Job], deque[_Job]] = (deque(), deque())
        self._unprepared: deque[_Job] = deque()
        self._turns = Turns(threads)
        self._wake = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kvtierd-io-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[Scratch], T]) -> asyncio.Future[T]:
        """Run `call(scratch)` in a thread, at once: headers and syncs."""
        return self._enter(self._plain, call)

    def read_patiently(self, transfer: Step, after: Step = _nothing) -> asyncio.Future[None]:
        """Read for nobody who waits, in the lane of writes: reads of clients go first. The rest is as in `read`."""
        return self._enter(self._lanes[Lane.WRITE], transfer, Lane.WRITE, after=after)

    def read(self, transfer: Step, after: Step, size_bytes: int) -> asyncio.Future[None]:
        """Run `transfer` when the device has room for a read, then `after` without holding that room."""
        return self._enter(self._lanes[Lane.READ], transfer, Lane.READ, size_bytes=size_bytes, after=after)

    def write(self, before: Step, transfer: Step, size_bytes: int) -> asyncio.Future[None]:
        """Run `before`, then `transfer` when the device has room for a write."""
        return self._enter(self._unprepared, transfer, Lane.WRITE, size_bytes=size_bytes, before=before)

    def _enter(
        self, queue: deque[_Job], transfer: Step, lane: Lane | None = None, **fields: Any
    ) -> asyncio.Future[Any]:
        job = _Job(asyncio.get_running_loop().create_future(), transfer, lane, **fields)
        with self._wake:
            if self._closed:
                raise RuntimeError("the I/O threads have ended")
            queue.append(job)
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
        try:
            while (found := self._next()) is not None:
                job, step = found
                step(job, scratch)
                del job, found  # a job holds its caller's buffers, and the next may be long in coming
        finally:
            scratch.close()

    def _next(self) -> tuple[_Job, Callable[[_Job, Scratch], None]] | None:
        """The next job and what to do with it; None when the pool is closed and there is nothing left."""
        with self._wake:
            while (found := self._take()) is None:
                if self._closed and not any(self._lanes):
                    return None
                self._wake.wait()
            if self._plain or self._unprepared or any(self._lanes):
                self._wake.notify()  # whoever takes a job wakes the next thread, as long as there may be more to do
            return found

    def _take(self) -> tuple[_Job, Callable[[_Job, Scratch], None]] | None:
        if self._plain:
            return self._plain.popleft(), self._run
        now_ns = time.monotonic_ns()
        lane = self._turns.next(len(self._lanes[Lane.READ]), len(self._lanes[Lane.WRITE]), now_ns)
        if lane is not None:
            job = self._lanes[lane].popleft()
            self._turns.begin(lane, job.size_bytes, now_ns)
            return job, self._run
        return (self._unprepared.popleft(), self._prepare) if self._unprepared else None

    def _prepare(self, job: _Job, scratch: Scratch) -> None:
        try:
            job.before(scratch)
        except BaseException as error:  # noqa: BLE001 - it is raised again where the future is awaited
            job.finish(error)
            return
        with self._wake:
            self._lanes[Lane.WRITE].append(job)
            self._wake.notify()

    def _run(self, job: _Job, scratch: Scratch) -> None:
        try:
            try:
                job.result = job.transfer(scratch)
            finally:
                self._leave(job)
            job.after(scratch)
        except BaseException as error:  # noqa: BLE001 - it is raised again where the future is awaited
            job.finish(error)
        else:
            job.finish(None)

    def _leave(self, job: _Job) -> None:
        """The device has room for another request."""
        if job.lane is None:
            return
        with self._wake:
            waiting = len(self._lanes[job.lane])
            self._turns.end(job.lane, job.size_bytes, waiting, time.monotonic_ns())
            # The next request is for another thread: this one may have something to verify.
            self._wake.notify()
