"""The daemon's ZeroMQ endpoint: takes requests in, hands them to the service, sends replies (protocol/SPEC.md §2, §5).

The ROUTER socket is drained from the loop through its file descriptor: zmq.asyncio makes a future for every frame
wait and reaches about half the message rate. That descriptor signals edges only, so the socket is read until it is
empty, in turns of bounded length, and looked at again after every send that happened outside such a turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from pathlib import Path

import zmq

from kvtierd.core.clock import Clock, SystemClock
from kvtierd.core.errors import ErrorCode, ExitCode, RequestError, StartupError
from kvtierd.protocol.codec import HeaderError, decode_request
from kvtierd.protocol.dispatch import Dispatcher
from kvtierd.protocol.endpoint import ARENA_NAME, SOCKET_NAME, prepare_path, set_mode
from kvtierd.protocol.gate import ConnectionGate, HiddenPath, connections_max
from kvtierd.protocol.handover import ArenaListener
from kvtierd.protocol.messages import MAX_BATCH, AnyRequest
from kvtierd.protocol.outbox import Outbox
from kvtierd.protocol.service import ChunkSource, Observer, Service, Session
from kvtierd.protocol.sessions import Life, Limits, SessionTable

log = logging.getLogger(__name__)

TURN_MESSAGES = 64
"""Requests taken up before timers and other sockets get their turn: about a millisecond of lookups."""
MAX_FRAMES = 2 + MAX_BATCH
QUEUE_MESSAGES = 8192
"""ZeroMQ's high-water mark a client, each way, in messages."""
LINGER_MS = 200
"""How long a closing daemon waits for clients to read their last replies."""


class Server:
    """One tenant's endpoint. All methods run on the loop.

    `folder` is the tenant's runtime folder, which exists; the caller holds its lock. `chunks` hands out the arena,
    None where there is none. `life` is what the endpoints of one daemon share.
    """

    _sessions_kind = SessionTable

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
        observer: Observer | None = None,
        life: Life | None = None,
    ) -> None:
        self._life = life or Life()
        self.path = Path(folder) / SOCKET_NAME
        self.endpoint = f"ipc://{self.path}"
        self.epoch = self._life.epoch
        self.limits = limits or Limits()
        self.counters: dict[str, int] = defaultdict(int)
        self._service = service
        self._clock = clock or SystemClock()
        self._name = name
        self._observer = observer
        self.sessions = self._sessions_kind(
            service,
            tenant,
            limits=self.limits,
            clock=self._clock,
            numbers=self._life.session_numbers,
            on_end=self._session_ended,
            is_reachable=self._is_reachable,
        )
        self.arena: ArenaListener | None = None
        if chunks is not None:
            path = Path(folder) / ARENA_NAME
            self.arena = ArenaListener(
                path, epoch=self.epoch, sessions=self.sessions, service=service, chunks=chunks, counters=self.counters
            )
        self._sweeper: asyncio.TimerHandle | None = None
        self._scheduled = False
        self._draining = False
        self._running = False

    async def start(self, *, replace_stale: bool = False) -> None:
        """Bind and serve. Raises StartupError when the path is taken, too long, or cannot be bound.

        `replace_stale` says that the caller holds the folder's lock, so that a socket there is a leftover.
        """
        self._loop = asyncio.get_running_loop()
        self._prepare(replace_stale=replace_stale)
        self._context = zmq.Context()
        try:
            self._socket = self._open_socket()
        except StartupError:
            self._context.term()
            raise
        self._gate = self._open_gate(connections_max() // self._life.endpoints)
        self._outbox = Outbox(self._socket, self.counters, self._after_send)
        self._dispatcher = self._make_dispatcher()
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

    def _prepare(self, *, replace_stale: bool) -> None:
        prepare_path(self.path, replace_stale=replace_stale)

    def _let_go(self) -> None:
        self.path.unlink(missing_ok=True)  # ZeroMQ removes only paths that it made up itself

    def _open_gate(self, limit: int) -> ConnectionGate:
        return ConnectionGate(self._socket, HiddenPath(self.path), limit)

    def _open_socket(self) -> zmq.Socket[bytes]:
        socket = self._new_socket()
        try:
            socket.bind(self.endpoint)
            set_mode(self.path)
        except (zmq.ZMQError, OSError) as error:
            socket.close(0)
            raise StartupError(ExitCode.IO, f"cannot bind {self.endpoint}: {error}") from error
        return socket

    def _new_socket(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, self.limits.max_message_bytes)
        socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        return socket

    def _make_dispatcher(self) -> Dispatcher:
        return Dispatcher(
            self._service,
            self.sessions,
            self._outbox,
            limits=self.limits,
            clock=self._clock,
            counters=self.counters,
            epoch=self.epoch,
            name=self._name,
            arena_path=str(self.arena.path) if self.arena is not None else "",
            observer=self._observer,
        )

    def stop_taking(self) -> None:
        """From now on every new request is answered `shutting_down`; those in flight go on."""
        self._dispatcher.stopping = True

    async def drain(self, timeout_s: float) -> bool:
        """Wait for the requests in flight; False when some were still there after `timeout_s`."""
        return await self._dispatcher.drain(timeout_s)

    async def close(self) -> None:
        """Cancel what is in flight, close and remove the sockets. The service is not told about sessions."""
        if not self._running:
            return
        self._running = False
        self._loop.remove_reader(self._fd)
        self._gate.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._dispatcher.cancel()
        if self.arena is not None:
            self.arena.close()
        self._socket.close()
        self._let_go()
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
        receive, empty = self._socket.recv, False
        self._draining = True
        try:
            for _ in range(TURN_MESSAGES):
                rid = receive(zmq.NOBLOCK)
                self._take(rid)
        except zmq.Again:
            empty = True
        finally:
            self._draining = False
            if not empty:  # also after a bug: nothing would tell of the messages behind it
                self._schedule()

    def _after_send(self) -> None:
        if not self._draining:  # a turn that is under way reads until the socket is empty
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
        request_id, request = 0, None
        try:
            request = decode_request(header.buffer)
            request_id = request.id
            self._check(rid, request, header, nbytes, count)
            self._dispatcher.serve(rid, request, frames)
        except HeaderError as error:
            self._dispatcher.fail(rid, error.request_id, error)
        except RequestError as error:
            self._dispatcher.fail(rid, request_id, error)
        except Exception as error:  # noqa: BLE001 - it is logged, and one bad request must not stop the others
            self._dispatcher.fail(rid, request_id, self._dispatcher.bug(error, request))

    def _check(self, rid: bytes, _request: AnyRequest, _header: zmq.Frame, nbytes: int, count: int) -> None:
        if rid[0] != 0:
            message = f"the routing id {rid[:16].hex()} was chosen by the client; leave that to ZeroMQ"
            raise RequestError(ErrorCode.BAD_FRAMES, message)
        if nbytes > self.limits.max_message_bytes:
            message = f"the message has {nbytes} bytes; the limit is {self.limits.max_message_bytes}"
            raise RequestError(ErrorCode.TOO_LARGE, message)
        if count > MAX_FRAMES:
            raise RequestError(ErrorCode.BAD_FRAMES, f"{count} frames are over the limit of {MAX_FRAMES}")

    # Housekeeping

    @property
    def _sweep_s(self) -> float:
        return max(0.05, min(30.0, self.limits.session_idle_s / 4))

    def _sweep(self) -> None:
        self.sessions.end_idle()
        self.sessions.end_gone()
        self._sweeper = self._loop.call_later(self._sweep_s, self._sweep)

    def _is_reachable(self, rid: bytes) -> bool:
        return self._outbox.is_reachable(rid)

    def _session_ended(self, session: Session) -> None:
        if self.arena is not None:
            self.arena.session_ended(session)
