"""How the synchronous client waits: it drives plans and polls the socket, for all threads that share a connection.

Threads share one connection: one of those that wait polls the socket for all, so that a long fetch in one thread does
not hold up a lookup in another.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvtierd.protocol.asking import Ask, Begin, Begun, Connect, Finish, Plan, Step, Work
from kvtierd.protocol.connection import Connection
from kvtierd.protocol.lifeline import LAST_WORDS_NS
from kvtierd.protocol.pending import Group, Pending, Received

T = TypeVar("T")

ABSENT_NS = 100_000_000
"""How long the first call waits for a daemon that cannot be reached; one that can is waited for up to the deadline."""
GRACE_NS = 5_000_000
"""How long a later call waits where the daemon is away or owes answers."""
SLICE_NS = 20_000_000
"""Longest sleep while a connection comes up: ZeroMQ tells of it, but only by an edge."""
MAX_UNANSWERED = 256
"""Requests of one batch sent before replies are taken in: many such batches fit under the high-water marks, which
count a message until the other side has told that it was read, every half mark."""
MARGIN_NS = 20_000_000
"""Most by which the daemon's deadline is before the caller's."""


class Waiter(Group):
    """A thread that waits: for its replies, or for its turn to poll."""

    __slots__ = ("event",)

    def __init__(self, wake: Callable[[Waiter], None]) -> None:
        super().__init__(lambda: wake(self))
        self.event = threading.Event()


class Driver:
    """Carries out plans over one connection. Thread-safe. `on_fork` is called in a forked child."""

    def __init__(self, connection: Connection, on_fork: Sequence[Callable[[], None]]) -> None:
        self._connection = connection
        self._on_fork = on_fork
        self._reset()
        _drivers.add(self)

    def _reset(self) -> None:
        self._lock = self._connection.lock
        self._tried = False
        self._leader: Waiter | None = None
        self._followers: list[Waiter] = []
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Closed with the driver and not with the client: a thread that still polls it would wait for another file.
        self._close_wake_fd = weakref.finalize(self, os.close, self._wake_fd)

    def run(self, plan: Plan[T]) -> T:
        """Carry out a plan and return its result, or raise what it raises."""
        outcome: object = None
        failure: Exception | None = None
        try:
            while True:
                step = plan.send(outcome) if failure is None else plan.throw(failure)
                try:
                    outcome, failure = self._carry_out(step), None
                except Exception as error:  # noqa: BLE001 - the plan decides what it means
                    failure = error
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            plan.close()  # an interrupted plan gives back what it holds now, not when its frame is collected

    def _carry_out(self, step: Step) -> object:
        match step:
            case Ask():
                return self._finish(self._begin(step))
            case Begin():
                return self._begin(step.ask)
            case Finish():
                return self._finish(step.begun)
            case Work():
                return step.function()
            case Connect():
                return self._connect(step)

    def post(self, function: Callable[[], None]) -> None:
        """Call something that sends without waiting for an answer."""
        with self._lock:
            if not self._connection.closed:
                function()

    def close(self) -> bool:
        """Close the connection and let all who wait go; False when it was closed before."""
        with self._lock:
            if self._connection.closed:
                return False
            self._connection.close()
            os.eventfd_write(self._wake_fd, 1)
            for waiter in self._followers:
                waiter.event.set()
            return True

    def after_fork(self) -> None:
        """In the child: nothing of the parent's is touched, and nobody waits."""
        self._close_wake_fd()
        self._connection.abandon()
        self._reset()
        for function in self._on_fork:
            function()

    # Connecting

    def _connect(self, step: Connect) -> bool:
        """Have a session. The first call waits a little, later ones fail fast as long as the daemon is away."""
        now_ns = time.monotonic_ns()
        absent_ns = step.deadline_ns if step.insist else now_ns + (GRACE_NS if self._tried else ABSENT_NS)
        self._tried = True
        while True:
            with self._lock:
                connection = self._connection
                if connection.step(now_ns):
                    return True
                if connection.refused(now_ns):
                    return False
                # Whoever took our Hello is there, and alive unless it owed us an answer before.
                patient = connection.hello_sent and not connection.silent
                descriptor = connection.fileno()
            left_ns = (step.deadline_ns if patient else min(step.deadline_ns, absent_ns)) - time.monotonic_ns()
            if left_ns <= 0:
                return False
            _poll([descriptor], min(left_ns, SLICE_NS))
            now_ns = time.monotonic_ns()

    # Asking

    def _begin(self, step: Ask) -> Begun:
        waiter = Waiter(self._wake)
        begun = Begun(step, waiter, [])
        try:
            self._send(step, waiter, begun.pending)
        except BaseException:
            self._give_up(waiter)
            raise
        waiter.floor = 0
        with self._lock:
            self._connection.drain()  # another thread may poll for what sending has taken in
        return begun

    def _finish(self, begun: Begun) -> list[Received | None]:
        waiter = begun.group
        assert isinstance(waiter, Waiter)
        try:
            self._wait(waiter, begun.ask.deadline_ns)
        finally:
            self._give_up(waiter)
        return begun.received()

    def _give_up(self, waiter: Waiter) -> None:
        """Forget replies that stayed out, if any."""
        with self._lock:
            if waiter.missing:
                self._connection.waited.forget(waiter)
                self._connection.lose()

    def _send(self, step: Ask, waiter: Waiter, pending: list[Pending]) -> None:
        wire_ns = wire_deadline_ns(step.deadline_ns)
        for request, frames in step.requests:
            with self._lock:
                if not self._connection.up or self._connection.session_no != step.session_no:
                    return
                sent = self._connection.submit(request, frames, wire_ns, waiter)
                if sent is None:
                    self._connection.lose()
                    return
            pending.append(sent)
            if waiter.missing >= MAX_UNANSWERED:
                waiter.floor = MAX_UNANSWERED // 2
                self._wait(waiter, step.deadline_ns)
                if waiter.missing > waiter.floor:
                    return

    def _wait(self, waiter: Waiter, deadline_ns: int) -> None:
        """Wait until no more than `floor` replies are missing; whoever waits first polls the socket for the others."""
        while waiter.missing > waiter.floor:
            with self._lock:
                self._connection.drain()
                if waiter.missing <= waiter.floor or not self._connection.is_open:
                    break
                leading = self._leader is None
                if leading:
                    self._leader = waiter
                else:
                    waiter.event.clear()
                    self._followers.append(waiter)
                descriptor = self._connection.fileno()
            left_ns = deadline_ns - time.monotonic_ns()
            try:
                if leading and left_ns > 0:
                    self._poll_for_all(descriptor, left_ns)
                elif left_ns > 0:
                    waiter.event.wait(left_ns / 1e9)
            finally:
                self._step_back(waiter, leading=leading)
            if left_ns <= 0:
                break
        with self._lock:
            if self._leader is None and self._followers:
                self._followers[0].event.set()  # its turn to poll

    def _step_back(self, waiter: Waiter, *, leading: bool) -> None:
        with self._lock:
            if leading:
                self._leader = None
            elif waiter in self._followers:
                self._followers.remove(waiter)

    def _poll_for_all(self, descriptor: int, left_ns: int) -> None:
        lifeline = self._connection.lifeline.descriptor
        ready = _poll([descriptor, self._wake_fd], left_ns, lifeline)
        if ready == [lifeline] and not _poll([descriptor, self._wake_fd], min(left_ns, LAST_WORDS_NS)):
            with self._lock:
                if self._connection.lifeline.is_cut():  # and it is no other file of the same number
                    self._connection.hang_up()
        if self._wake_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)

    def _wake(self, waiter: Waiter) -> None:
        """Called under the lock by the thread that took in the reply that a waiter waits for; it may be its own."""
        if waiter is self._leader:
            os.eventfd_write(self._wake_fd, 1)
        else:
            waiter.event.set()


def _poll(descriptors: list[int], timeout_ns: int, lifeline: int = -1) -> list[int]:
    """Which descriptors became readable within the time, and the lifeline if it was cut."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    if lifeline >= 0:
        poller.register(lifeline, 0)
    return [descriptor for descriptor, _ in poller.poll(-(-timeout_ns // 1_000_000))]


def wire_deadline_ns(deadline_ns: int) -> int:
    """The daemon's deadline, a little before ours: a late answer should be its `deadline`, not silence."""
    left_ns = deadline_ns - time.monotonic_ns()
    return deadline_ns - min(MARGIN_NS, max(0, left_ns) // 10)


_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for driver in list(_drivers):
        driver.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
