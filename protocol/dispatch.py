"""What happens to one decoded request: checks, the service, its answer or error, in time (SPEC.md §5 to §7)."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Sequence

from kvtierd.core.clock import Clock
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.protocol.codec import check_frames, clip, encode
from kvtierd.protocol.granted import giving_back
from kvtierd.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    AnyReply,
    AnyRequest,
    CloseSequence,
    Commit,
    ErrorReply,
    Hello,
    HelloReply,
    Lookup,
    RegisterNamespace,
    Release,
    Stats,
    Unpin,
)
from kvtierd.protocol.outbox import Outbox
from kvtierd.protocol.service import Answer, Observer, RequestQuota, Service, Session
from kvtierd.protocol.sessions import Limits, Peer, SessionTable

log = logging.getLogger(__name__)

Frames = Sequence[memoryview]

_QUIET = frozenset({CloseSequence, Commit, Release})
"""Unanswered where the request says so and nothing is wrong."""
_CHEAP = frozenset({Lookup, Release, Abort, CloseSequence, Commit, Unpin, Stats, RegisterNamespace})
"""Taken up even where the session has all its requests in flight: they only read, or give something back."""
GRACE_S = 0.005
"""A request past its deadline is cancelled, and answered all the same when it has not ended so long afterwards: a disk
that stands still may hold it. Most end at once, and then the place that they had is free when the answer is read."""


class Dispatcher:
    """Serves requests of one endpoint. All methods run on the loop.

    Nothing here waits: what takes time becomes a task, at most `max_inflight` a session, each under its deadline.
    """

    def __init__(
        self,
        service: Service,
        sessions: SessionTable,
        outbox: Outbox,
        *,
        limits: Limits,
        clock: Clock,
        counters: dict[str, int],
        epoch: int,
        name: str,
        arena_path: str,
        observer: Observer | None = None,
    ) -> None:
        self._service = service
        self._sessions = sessions
        self._outbox = outbox
        self._limits = limits
        self._clock = clock
        self._counters = counters
        self._epoch = epoch
        self._name = name
        self._arena_path = arena_path
        self._observe = observer or _nobody
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._late: set[asyncio.Task[None]] = set()
        """Of requests that have been answered `deadline` and have not ended yet."""
        self._reported: set[tuple[type, str, int]] = set()
        self.stopping = False

    async def drain(self, timeout_s: float) -> bool:
        """Wait for the requests in flight; False when some were still there after `timeout_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        return not self._tasks

    async def cancel(self) -> None:
        """Cancel the requests in flight and wait for their end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def serve(self, rid: bytes, request: AnyRequest, frames: list[memoryview]) -> None:
        """Answer a request, or start what will. Raises RequestError, which its caller answers with `fail`."""
        now_ns = self._clock.now_ns()
        kind = type(request)
        if kind is Hello:
            check_frames(request, frames)
            self._hello(rid, request)  # type: ignore[arg-type]
            return
        peer = self._peer(rid, request)
        peer.seen_ns = now_ns
        if 0 < request.deadline_ns < now_ns:
            late_ms = (now_ns - request.deadline_ns) / 1e6
            raise RequestError(ErrorCode.DEADLINE, f"the request was taken up {late_ms:.1f} ms after its deadline")
        check_frames(request, frames)
        if peer.unsent_bytes >= self._limits.max_message_bytes:
            message = f"{peer.unsent_bytes} bytes of earlier replies are not read yet"
            raise RequestError(ErrorCode.BUSY, message, retry_after_ms=10)
        if kind not in _CHEAP:
            self._check_load(peer)
        try:
            answer = self._service.handle(peer.session, request, frames)
        except RequestError as error:
            self._observe(peer.session, request, frames, now_ns, error.code)
            raise
        if type(answer) is Answer:
            self._reply(peer, request, answer)
            self._observe(peer.session, request, frames, now_ns, answer.reply)
        else:
            self._start(peer, request, frames, answer, now_ns)  # type: ignore[arg-type]

    def _peer(self, rid: bytes, request: AnyRequest) -> Peer:
        if request.epoch != self._epoch:
            message = f"epoch {request.epoch} is not this daemon's life: say hello and register again"
            raise RequestError(ErrorCode.STALE_EPOCH, message)
        peer = self._sessions.by_rid.get(rid)
        if peer is None:
            raise RequestError(ErrorCode.NO_SESSION, "this connection has no session: say hello and register again")
        if self.stopping:
            raise RequestError(ErrorCode.SHUTTING_DOWN, "the daemon is stopping")
        return peer

    def _check_load(self, peer: Peer) -> None:
        if len(peer.tasks) >= self._limits.max_inflight:
            message = f"{len(peer.tasks)} requests of this session are in flight, which is the limit"
            raise RequestError(ErrorCode.BUSY, message, retry_after_ms=10)
        if (quota := peer.session.quota) is not None and quota.full:
            quota.refused += 1
            message = f"{quota.count} requests of this tenant are in flight, which is its limit"
            raise RequestError(ErrorCode.BUSY, message, retry_after_ms=10)

    def _hello(self, rid: bytes, request: Hello) -> None:
        if self.stopping:
            raise RequestError(ErrorCode.SHUTTING_DOWN, "the daemon is stopping")
        peer = self._sessions.hello(rid, request)
        reply = HelloReply(
            id=request.id,
            version=PROTOCOL_VERSION,
            server=self._name,
            token=peer.session.token,
            arena=self._arena_path,
            max_batch=self._limits.max_batch,
            max_message_bytes=self._limits.max_message_bytes,
            max_inflight=self._limits.max_inflight,
            lease_ttl_ms=self._limits.lease_ttl_ms,
        )
        self._reply(peer, request, Answer(reply))

    def _start(
        self, peer: Peer, request: AnyRequest, frames: Frames, awaitable: Awaitable[Answer], now_ns: int
    ) -> None:
        if len(peer.tasks) >= self._limits.max_inflight:
            _drop(awaitable)
            raise RequestError(ErrorCode.BUSY, "too many requests of this session are in flight", retry_after_ms=10)
        budget_s = self._limits.default_deadline_s
        if request.deadline_ns > 0:
            budget_s = min(budget_s, (request.deadline_ns - now_ns) / 1e9)
        task = self._loop.create_task(self._finish(peer, request, frames, awaitable, now_ns, budget_s))
        # In two steps: a loop that was held up past both times must still let the request end first.
        late = (GRACE_S, self._answer_late, task, peer, request, frames, now_ns, budget_s)
        timer = self._loop.call_later(budget_s, self._loop.call_later, *late)
        task.add_done_callback(lambda _: timer.cancel())
        peer.tasks.add(task)
        self._tasks.add(task)
        if (quota := peer.session.quota) is not None:
            quota.count += 1
            task.add_done_callback(lambda _: _one_less(quota))
        task.add_done_callback(peer.tasks.discard)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._late.discard)
        task.add_done_callback(lambda _: _drop(awaitable))

    async def _finish(
        self,
        peer: Peer,
        request: AnyRequest,
        frames: Frames,
        awaitable: Awaitable[Answer],
        begin_ns: int,
        budget_s: float,
    ) -> None:
        failure: RequestError | None = None
        try:
            answer = await self._in_time(peer, awaitable, budget_s)
            if self._is_late():
                self._outbox.drop(answer)
                self._undo(peer, answer)
                return
            self._reply(peer, request, answer)
            self._observe(peer.session, request, frames, begin_ns, answer.reply)
        except TimeoutError:
            failure = _not_done(budget_s)
        except RequestError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - it is logged
            failure = self.bug(error, request)
        if failure is not None and not self._is_late():
            self.fail(peer.rid, request.id, failure)
            self._observe(peer.session, request, frames, begin_ns, failure.code)

    def _is_late(self) -> bool:
        """Whether the request of this task has been answered already."""
        return asyncio.current_task() in self._late

    def _answer_late(
        self,
        task: asyncio.Task[None],
        peer: Peer,
        request: AnyRequest,
        frames: Frames,
        begin_ns: int,
        budget_s: float,
    ) -> None:
        """Answer a request that does not end though it was cancelled; what comes of it is given back."""
        if task.done():
            return
        self._late.add(task)
        self._counters["late_requests_total"] += 1
        self.fail(peer.rid, request.id, _not_done(budget_s))
        self._observe(peer.session, request, frames, begin_ns, ErrorCode.DEADLINE)

    @staticmethod
    async def _in_time(peer: Peer, awaitable: Awaitable[Answer], budget_s: float) -> Answer:
        try:
            async with asyncio.timeout(budget_s):
                return await awaitable
        finally:
            # Before the answer leaves: whoever has read it may use the place that it frees.
            peer.tasks.discard(asyncio.current_task())

    def _reply(self, peer: Peer, request: AnyRequest, answer: Answer) -> None:
        if type(request) in _QUIET and request.quiet:  # type: ignore[union-attr]
            return
        reply = answer.reply
        reply.id = request.id
        reply.epoch = self._epoch
        if not self._outbox.send(peer.rid, encode(reply), answer, peer):
            self._undeliverable(peer, answer)

    def _undeliverable(self, peer: Peer, answer: Answer) -> None:
        """A client is gone or does not read: give back what it was granted, and end a session that hangs on nothing."""
        self._undo(peer, answer)
        if self._outbox.is_gone(peer.rid) and not peer.session.attached:
            self._sessions.end(peer)

    def _undo(self, peer: Peer, answer: Answer) -> None:
        if (request := giving_back(answer.reply)) is None:
            return
        request.epoch = self._epoch
        with contextlib.suppress(RequestError):  # it ended meanwhile, which is all we wanted
            result = self._service.handle(peer.session, request, ())
            if type(result) is not Answer:
                self._start(peer, request, (), result, self._clock.now_ns())  # type: ignore[arg-type]

    def fail(self, rid: bytes, request_id: int, error: RequestError) -> None:
        """Answer with an error."""
        self._counters[f"errors_{error.code}_total"] += 1
        reply = ErrorReply(
            id=request_id,
            epoch=self._epoch,
            code=error.code,
            message=clip(str(error)),
            retry_after_ms=error.retry_after_ms,
        )
        self._outbox.send(rid, encode(reply), Answer(reply), None)

    def bug(self, error: Exception, request: AnyRequest | None = None) -> RequestError:
        """Log an error that is ours, each place once with its traceback; what to tell the client."""
        last = error.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        place = (type(error), last.tb_frame.f_code.co_filename if last else "", last.tb_lineno if last else 0)
        if place not in self._reported:
            self._reported.add(place)
            fields = {"request": str(request.__struct_config__.tag), "request_id": request.id} if request else {}
            message = "a request failed; from now on failures at this place are only counted"
            log.error(message, exc_info=error, extra={"fields": fields})
        return RequestError(ErrorCode.INTERNAL, f"{type(error).__name__} in the daemon; its journal has the details")


def _nobody(_session: Session, _request: AnyRequest, _frames: Frames, _begin_ns: int, _outcome: AnyReply | str) -> None:
    """Nobody observes."""


def _not_done(budget_s: float) -> RequestError:
    return RequestError(ErrorCode.DEADLINE, f"not done within {budget_s:.3f} s")


def _one_less(quota: RequestQuota) -> None:
    quota.count -= 1


def _drop(awaitable: object) -> None:
    """Let go of an answer that nobody will await; a coroutine closed before its first step did nothing."""
    if inspect.iscoroutine(awaitable):
        awaitable.close()
    elif isinstance(awaitable, asyncio.Future) and not awaitable.done():
        awaitable.cancel()
