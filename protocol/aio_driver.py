"""How the asynchronous client waits: the loop watches ZeroMQ's descriptor, and copies run in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvtierd.protocol.asking import Ask, Begin, Begun, Connect, Finish, Plan, Step, Work
from kvtierd.protocol.connection import Connection
from kvtierd.protocol.lifeline import LAST_WORDS_NS
from kvtierd.protocol.pending import Group, Pending, Received
from kvtierd.protocol.waiting import ABSENT_NS, GRACE_NS, MAX_UNANSWERED, SLICE_NS, wire_deadline_ns

T = TypeVar("T")


class Waiters(Group):
    """Replies that a task waits for, or will."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        self.event = asyncio.Event()
        super().__init__(self.event.set)


class AsyncDriver:
    """Carries out plans over one connection, on the loop that first ran one. `on_fork` is called in a forked child."""

    def __init__(self, connection: Connection, on_fork: Sequence[Callable[[], None]]) -> None:
        self._connection = connection
        self._on_fork = on_fork
        self._reset()
        _drivers.add(self)

    def _reset(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched: tuple[int, int] | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._tried = False
        self._waiting: set[asyncio.Event] = set()

    async def run(self, plan: Plan[T]) -> T:
        """Carry out a plan and return its result, or raise what it raises."""
        self._claim_loop()
        outcome: object = None
        failure: Exception | None = None
        try:
            while True:
                step = plan.send(outcome) if failure is None else plan.throw(failure)
                try:
                    outcome, failure = await self._carry_out(step), None
                except Exception as error:  # noqa: BLE001 - the plan decides what it means
                    failure = error
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            plan.close()

    async def _carry_out(self, step: Step) -> object:
        match step:
            case Ask():
                return await self._finish(await self._begin(step))
            case Begin():
                return await self._begin(step.ask)
            case Finish():
                return await self._finish(step.begun)
            case Work():
                return await self._work(step)
            case Connect():
                return await self._connect(step)

    def post(self, function: Callable[[], None]) -> None:
        """Call something that sends without waiting for an answer."""
        if not self._connection.closed:
            function()
            self._take_in()

    async def close(self) -> bool:
        """Close the connection and let all who wait go; False when it was closed before."""
        if self._connection.closed:
            return False
        self._unwatch()
        self._connection.close()
        for event in self._waiting:
            event.set()
        if self._worker is not None:
            worker, self._worker = self._worker, None
            await asyncio.to_thread(worker.shutdown)
        return True

    def after_fork(self) -> None:
        """In the child: the loop, its watches and the thread are the parent's."""
        self._reset()
        self._connection.abandon()
        for function in self._on_fork:
            function()

    def _claim_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError("this client belongs to another event loop: make one for each")

    # Watching the socket

    def _take_in(self) -> None:
        """Take in replies; after every send too, because sending may swallow the edge that told of one."""
        self._connection.drain()
        self._watch()

    def _watch(self) -> None:
        """Follow the connection from socket to socket."""
        connection = self._connection
        if not connection.is_open or self._loop is None:
            return
        current = (connection.socket_no, connection.fileno())
        if current != self._watched:
            self._unwatch()
            self._loop.add_reader(current[1], self._readable)
            self._watched = current

    def _unwatch(self) -> None:
        if self._watched is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._watched[1])
        self._watched = None

    def _readable(self) -> None:
        was_up = self._connection.up
        self._connection.drain()
        if self._connection.up is not was_up:
            for event in self._waiting:
                event.set()

    async def _sleep(self, event: asyncio.Event, timeout_ns: int) -> None:
        event.clear()
        self._waiting.add(event)
        try:
            async with asyncio.timeout(timeout_ns / 1e9):
                await event.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting.discard(event)

    # Steps

    async def _connect(self, step: Connect) -> bool:
        """Have a session; the rules are those of the sync client."""
        connection = self._connection
        now_ns = time.monotonic_ns()
        absent_ns = step.deadline_ns if step.insist else now_ns + (GRACE_NS if self._tried else ABSENT_NS)
        self._tried = True
        event = asyncio.Event()
        while True:
            if connection.step(now_ns):
                self._watch()
                return True
            self._watch()
            if connection.refused(now_ns):
                return False
            patient = connection.hello_sent and not connection.silent
            left_ns = (step.deadline_ns if patient else min(step.deadline_ns, absent_ns)) - time.monotonic_ns()
            if left_ns <= 0:
                return False
            await self._sleep(event, min(left_ns, SLICE_NS))
            now_ns = time.monotonic_ns()

    async def _begin(self, step: Ask) -> Begun:
        group = Waiters()
        begun = Begun(step, group, [])
        try:
            await self._send(step, group, begun.pending)
        except BaseException:
            self._give_up(group, step.deadline_ns)
            raise
        group.floor = 0
        self._take_in()  # another task may wait for what sending has taken in
        return begun

    async def _finish(self, begun: Begun) -> list[Received | None]:
        group = begun.group
        assert isinstance(group, Waiters)
        try:
            await self._wait(group, begun.ask.deadline_ns)
        finally:
            self._give_up(group, begun.ask.deadline_ns)
        return begun.received()

    def _give_up(self, group: Group, deadline_ns: int) -> None:
        """Forget replies that stayed out, if any."""
        if group.missing:
            self._connection.waited.forget(group)
            if time.monotonic_ns() >= deadline_ns:  # not when we were cancelled
                self._connection.lose()

    async def _send(self, step: Ask, group: Waiters, pending: list[Pending]) -> None:
        wire_ns = wire_deadline_ns(step.deadline_ns)
        for request, frames in step.requests:
            if not self._connection.up or self._connection.session_no != step.session_no:
                return
            sent = self._connection.submit(request, frames, wire_ns, group)
            if sent is None:
                self._connection.lose()
                return
            pending.append(sent)
            if group.missing >= MAX_UNANSWERED:
                group.floor = MAX_UNANSWERED // 2
                await self._wait(group, step.deadline_ns)
                if group.missing > group.floor:
                    return

    async def _wait(self, group: Waiters, deadline_ns: int) -> None:
        while group.missing > group.floor:
            self._take_in()
            if group.missing <= group.floor or not self._connection.is_open:
                return
            left_ns = deadline_ns - time.monotonic_ns()
            if left_ns <= 0:
                return
            lifeline = self._connection.lifeline
            cut = lifeline.is_cut()
            await self._sleep(group.event, min(left_ns, LAST_WORDS_NS) if lifeline.descriptor >= 0 else left_ns)
            self._connection.drain()
            if cut and group.missing > group.floor and lifeline.is_cut():
                self._connection.hang_up()

    async def _work(self, step: Work) -> object:
        """Run something that copies in a thread; cancelled, wait for its end: it writes into the caller's memory."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvtierd-aio")
        assert self._loop is not None
        future = self._loop.run_in_executor(self._worker, step.function)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            raise


_drivers: weakref.WeakSet[AsyncDriver] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for driver in list(_drivers):
        driver.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
