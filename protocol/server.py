"""The daemon's ZeroMQ endpoint: takes requests in, hands them to the service, sends replies (protocol/SPEC.md §2, §5).

The ROUTER socket is drained from the loop through its file descriptor: zmq.asyncio makes a future for every frame
wait and reaches about half the message rate. That descriptor signals edges only, so the socket is read until it is
empty, in turns of bounded length, and looked at again after every send that happened outside such a turn.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
from collections import defaultdict
from collections.abc import Awaitable
from pathlib import Path

import zmq

from kvtierd.core.clock import Clock, SystemClock
from kvtierd.core.errors import ErrorCode, ExitCode, RequestError, StartupError
from kvtierd.protocol.codec import HeaderError, check_frames, clip, decode_request, encode
from kvtierd.protocol.endpoint import ARENA_NAME, SOCKET_NAME, prepare_path, socket_mode
from kvtierd.protocol.handover import ArenaListener
from kvtierd.protocol.messages import (
    MAX_BATCH,
    PROTOCOL_VERSION,
    Abort,
    AcquireReply,
    AnyRequest,
    Commit,
    ErrorReply,
    Get,
    Hello,
    HelloReply,
    Lookup,
    RegisterNamespace,
    Release,
    ReserveReply,
    Stats,
    Unpin,
)
from kvtierd.protocol.outbox import Outbox
from kvtierd.protocol.service import Answer, ChunkSource, Service, Session
from kvtierd.protocol.sessions import Limits, Peer, SessionTable

log = logging.getLogger(__name__)

TURN_MESSAGES = 64
"""Requests taken up before timers and other sockets get their turn: about a millisecond of lookups."""
MAX_FRAMES = 2 + MAX_BATCH
QUEUE_MESSAGES = 1000
"""ZeroMQ's high-water mark a client, each way, in messages."""
LINGER_MS = 200
"""How long a closing daemon waits for clients to read their last replies."""

_CHEAP = frozenset({Lookup, Release, Abort, Commit, Unpin, Stats, RegisterNamespace})
"""Taken up even where the session has all its requests in flight: they only read, or give something back."""


class Server:
    """One tenant's endpoint. All methods run on the loop.

    `folder` is the tenant's runtime folder, which exists; the caller holds its lock. `chunks` hands out the arena,
    None where there is none.
    """

    def __init__(
        self,
        service: Service,
        folder: Path,
        *,
        tenant: str = "default",
        limits: Limits | None = None,
        chunks: ChunkSource | None = None,
        clock: Clock | None = None,
        name: str = "kvtierd",
    ) -> None:
        self.path = Path(folder) / SOCKET_NAME
        self.endpoint = f"ipc://{self.path}"
        self.epoch = 1 + secrets.randbelow((1 << 63) - 1)
        self.limits = limits or Limits()
        self.counters: dict[str, int] = defaultdict(int)
        self._service = service
        self._clock = clock or SystemClock()
        self._name = name
        self.sessions = SessionTable(service, tenant, self.limits, self._clock, self._session_ended)
        self.arena: ArenaListener | None = None
        if chunks is not None:
            path = Path(folder) / ARENA_NAME
            self.arena = ArenaListener(
                path, epoch=self.epoch, sessions=self.sessions, service=service, chunks=chunks, counters=self.counters
            )
        self._tasks: set[asyncio.Task[None]] = set()
        self._reported: set[tuple[type, str, int]] = set()
        self._scheduled = False
        self._stopping = False
        self._running = False

    async def start(self, *, replace_stale: bool = False) -> None:
        """Bind and serve. Raises StartupError when the path is taken, too long, or cannot be bound.

        `replace_stale` says that the caller holds the folder's lock, so that a socket there is a leftover.
        """
        self._loop = asyncio.get_running_loop()
        prepare_path(self.path, replace_stale=replace_stale)
        self._context = zmq.Context()
        try:
            self._socket = self._open_socket()
        except StartupError:
            self._context.term()
            raise
        self._outbox = Outbox(self._socket, self.counters)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._running = True
        self._loop.add_reader(self._fd, self._drain)
        if self.arena is not None:
            try:
                self.arena.start(replace_stale=replace_stale)
            except StartupError:
                await self.close()
                raise
        self._schedule()
        self._sweeper = self._loop.call_later(self._sweep_s, self._sweep)

    def _open_socket(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, self.limits.max_message_bytes)
        socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        try:
            with socket_mode():
                socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            raise StartupError(ExitCode.IO, f"cannot bind {self.endpoint}: {error}") from error
        return socket

    def stop_taking(self) -> None:
        """From now on every new request is answered `shutting_down`; those in flight go on."""
        self._stopping = True

    async def drain(self, timeout_s: float) -> bool:
        """Wait for the requests in flight; False when some were still there after `timeout_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        return not self._tasks

    async def close(self) -> None:
        """Cancel what is in flight, close and remove the sockets. The service is not told about sessions."""
        if not self._running:
            return
        self._running = False
        self._loop.remove_reader(self._fd)
        if hasattr(self, "_sweeper"):
            self._sweeper.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.arena is not None:
            self.arena.close()
        self._socket.close()
        self.path.unlink(missing_ok=True)  # ZeroMQ removes only paths that it made up itself
        await self._loop.run_in_executor(None, self._context.term)  # waits for replies on their way: LINGER_MS
        self._outbox.close()

    # Receiving

    def _schedule(self) -> None:
        if not self._scheduled and self._running:
            self._scheduled = True
            self._loop.call_soon(self._continue)

    def _continue(self) -> None:
        self._scheduled = False
        self._drain()

    def _drain(self) -> None:
        if not self._running:
            return
        receive = self._socket.recv
        try:
            for _ in range(TURN_MESSAGES):
                rid = receive(zmq.NOBLOCK)
                self._take(rid)
        except zmq.Again:
            return
        self._schedule()

    def _take(self, rid: bytes) -> None:
        """Receive what follows a routing id (ZeroMQ delivers whole messages) and serve it."""
        receive = self._socket.recv
        header = receive(zmq.NOBLOCK, copy=False)
        nbytes, more, frames = len(header), header.more, []
        count = 0
        while more:
            frame = receive(zmq.NOBLOCK, copy=False)
            nbytes += len(frame)
            count += 1
            more = frame.more
            # Frames beyond the limits are let go at once: only their number and size matter for the answer.
            if nbytes <= self.limits.max_message_bytes and count <= MAX_FRAMES:
                frames.append(frame.buffer)
        self.counters["requests_total"] += 1
        self.counters["received_bytes_total"] += nbytes
        request_id = 0
        try:
            request = decode_request(header.buffer)
            request_id = request.id
            self._check_size(rid, nbytes, count)
            self._serve(rid, request, frames)
        except HeaderError as error:
            self._fail(rid, error.request_id, error)
        except RequestError as error:
            self._fail(rid, request_id, error)

    def _check_size(self, rid: bytes, nbytes: int, count: int) -> None:
        if rid[0] != 0:
            message = f"the routing id {rid[:16].hex()} was chosen by the client; leave that to ZeroMQ"
            raise RequestError(ErrorCode.BAD_FRAMES, message)
        if nbytes > self.limits.max_message_bytes:
            message = f"the message has {nbytes} bytes; the limit is {self.limits.max_message_bytes}"
            raise RequestError(ErrorCode.TOO_LARGE, message)
        if count > MAX_FRAMES:
            raise RequestError(ErrorCode.BAD_FRAMES, f"{count} frames are over the limit of {MAX_FRAMES}")

    # Serving

    def _serve(self, rid: bytes, request: AnyRequest, frames: list[memoryview]) -> None:
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
        if kind not in _CHEAP:
            self._check_load(peer, kind)
        try:
            answer = self._service.handle(peer.session, request, frames)
        except RequestError:
            raise
        except Exception as error:
            raise self._bug(request, error) from error
        if type(answer) is Answer:
            self._reply(peer, request, answer)
        else:
            self._start(peer, request, answer, now_ns)  # type: ignore[arg-type]

    def _peer(self, rid: bytes, request: AnyRequest) -> Peer:
        if request.epoch != self.epoch:
            message = f"epoch {request.epoch} is not this daemon's life: say hello and register again"
            raise RequestError(ErrorCode.STALE_EPOCH, message)
        peer = self.sessions.by_rid.get(rid)
        if peer is None:
            raise RequestError(ErrorCode.NO_SESSION, "this connection has no session: say hello and register again")
        if self._stopping:
            raise RequestError(ErrorCode.SHUTTING_DOWN, "the daemon is stopping")
        return peer

    def _check_load(self, peer: Peer, kind: type) -> None:
        if len(peer.tasks) >= self.limits.max_inflight:
            message = f"{len(peer.tasks)} requests of this session are in flight, which is the limit"
            raise RequestError(ErrorCode.BUSY, message, retry_after_ms=10)
        if kind is Get and peer.unsent_bytes >= self.limits.max_message_bytes:
            message = f"{peer.unsent_bytes} bytes of earlier replies are not read yet"
            raise RequestError(ErrorCode.BUSY, message, retry_after_ms=10)

    def _hello(self, rid: bytes, request: Hello) -> None:
        if self._stopping:
            raise RequestError(ErrorCode.SHUTTING_DOWN, "the daemon is stopping")
        peer = self.sessions.hello(rid, request)
        reply = HelloReply(
            id=request.id,
            version=PROTOCOL_VERSION,
            server=self._name,
            token=peer.session.token,
            arena=str(self.arena.path) if self.arena is not None else "",
            max_batch=self.limits.max_batch,
            max_message_bytes=self.limits.max_message_bytes,
            max_inflight=self.limits.max_inflight,
            lease_ttl_ms=self.limits.lease_ttl_ms,
        )
        self._reply(peer, request, Answer(reply))

    def _start(self, peer: Peer, request: AnyRequest, awaitable: Awaitable[Answer], now_ns: int) -> None:
        if len(peer.tasks) >= self.limits.max_inflight:
            _drop(awaitable)
            raise RequestError(ErrorCode.BUSY, "too many requests of this session are in flight", retry_after_ms=10)
        budget_s = self.limits.default_deadline_s
        if request.deadline_ns > 0:
            budget_s = min(budget_s, (request.deadline_ns - now_ns) / 1e9)
        task = self._loop.create_task(self._finish(peer, request, awaitable, budget_s))
        peer.tasks.add(task)
        self._tasks.add(task)
        task.add_done_callback(peer.tasks.discard)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: _drop(awaitable))

    async def _finish(self, peer: Peer, request: AnyRequest, awaitable: Awaitable[Answer], budget_s: float) -> None:
        try:
            async with asyncio.timeout(budget_s):
                answer = await awaitable
        except TimeoutError:
            self._fail(peer.rid, request.id, RequestError(ErrorCode.DEADLINE, f"not done within {budget_s:.3f} s"))
        except RequestError as error:
            self._fail(peer.rid, request.id, error)
        except Exception as error:  # noqa: BLE001 - _bug logs it
            self._fail(peer.rid, request.id, self._bug(request, error))
        else:
            self._reply(peer, request, answer)
        self._schedule()

    def _reply(self, peer: Peer, request: AnyRequest, answer: Answer) -> None:
        if type(request) is Release and request.quiet:
            return
        reply = answer.reply
        reply.id = request.id
        reply.epoch = self.epoch
        if not self._outbox.send(peer.rid, encode(reply), answer, peer):
            self._undo(peer, answer)

    def _undo(self, peer: Peer, answer: Answer) -> None:
        """Give back what a client was granted that will never hear of it."""
        request: AnyRequest
        match answer.reply:
            case ReserveReply(reservation=number) if number:
                request = Abort(id=0, epoch=self.epoch, reservation=number)
            case AcquireReply(lease=number) if number:
                request = Release(id=0, epoch=self.epoch, leases=[number], quiet=True)
            case _:
                return
        try:
            result = self._service.handle(peer.session, request, ())
        except RequestError:
            return  # it ended meanwhile, which is all we wanted
        if type(result) is not Answer:
            self._start(peer, request, result, self._clock.now_ns())  # type: ignore[arg-type]

    def _fail(self, rid: bytes, request_id: int, error: RequestError) -> None:
        self.counters[f"errors_{error.code}_total"] += 1
        reply = ErrorReply(
            id=request_id,
            epoch=self.epoch,
            code=error.code,
            message=clip(str(error)),
            retry_after_ms=error.retry_after_ms,
        )
        self._outbox.send(rid, encode(reply), Answer(reply), None)

    def _bug(self, request: AnyRequest, error: Exception) -> RequestError:
        """Log an error that is ours, each place once with its traceback, and say so to the client."""
        last = error.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        place = (type(error), last.tb_frame.f_code.co_filename if last else "", last.tb_lineno if last else 0)
        if place not in self._reported:
            self._reported.add(place)
            log.error(
                "%s failed; from now on failures at this place are only counted", type(request).__name__, exc_info=error
            )
        return RequestError(ErrorCode.INTERNAL, f"{type(error).__name__} in the daemon; its journal has the details")

    # Housekeeping

    @property
    def _sweep_s(self) -> float:
        return max(0.05, min(30.0, self.limits.session_idle_s / 4))

    def _sweep(self) -> None:
        self.sessions.end_idle()
        self._sweeper = self._loop.call_later(self._sweep_s, self._sweep)

    def _session_ended(self, session: Session) -> None:
        if self.arena is not None:
            self.arena.session_ended(session)


def _drop(awaitable: object) -> None:
    """Let go of an answer that nobody will await; a coroutine closed before its first step did nothing."""
    if inspect.iscoroutine(awaitable):
        awaitable.close()
    elif isinstance(awaitable, asyncio.Future) and not awaitable.done():
        awaitable.cancel()
