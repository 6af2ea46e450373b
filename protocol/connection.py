"""A client's connection: one DEALER socket, never waited on, and the state of its session (protocol/SPEC.md §5).

Everything here returns at once. The sync and the async client share it and differ only in how they wait for the
descriptor. States: *down* (no session: calls fail fast, each takes one cheap step towards a session), and *up*.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence

import msgspec
import zmq

from kvtierd.core.errors import ErrorCode, KvtierdError, RequestError
from kvtierd.protocol.codec import decode_reply, encode
from kvtierd.protocol.curve import CurveKeys, keys_for
from kvtierd.protocol.granted import giving_back
from kvtierd.protocol.lifeline import Lifeline
from kvtierd.protocol.messages import (
    MAX_BATCH,
    PROTOCOL_VERSION,
    AcquireReply,
    AnyReply,
    AnyRequest,
    Commit,
    ErrorReply,
    Hello,
    HelloReply,
    ReserveReply,
    SequenceReply,
)
from kvtierd.protocol.orphans import Orphans
from kvtierd.protocol.pending import Group, HandedOver, Pending, Waited
from kvtierd.protocol.sending import send_message
from kvtierd.protocol.service import Frame

HELLO_PATIENCE_NS = 500_000_000
"""After this long without an answer Hello is sent again: the connection may have been lost behind our back."""
FRESH_SOCKET_NS = 100_000_000
"""Least time between two new sockets while the daemon is away."""
RECONNECT_MS = 50
QUEUE_MESSAGES = 8192
"""ZeroMQ's high-water mark: over what all threads together leave unanswered."""
MAX_HELLOS = 16
_SESSION_LOST = frozenset({ErrorCode.STALE_EPOCH, ErrorCode.NO_SESSION})


class Unavailable(KvtierdError):  # noqa: N818 - a state of the daemon, named as operators name it
    """The daemon did not answer in time: it is not running, stopped or overloaded."""


class Connection:
    """Not thread-safe: its owner serialises the calls. `counters` count what a caller does not see.

    Raises ValueError for an endpoint that is neither `ipc://PATH` nor `tcp://HOST:PORT`, and for the latter without
    keys: those of `curve`, else of the environment.
    """

    def __init__(self, endpoint: str, name: str, curve: CurveKeys | None = None) -> None:
        self._curve = keys_for(endpoint, curve)
        self.endpoint = endpoint
        self.name = name
        self.lock = threading.RLock()
        """Held around everything that touches the socket: a message of several frames must not be interleaved."""
        self.counters: Counter[str] = Counter()
        self.up = False
        self.silent = False
        """Whether the session was lost because an answer stayed out, and no Hello has been answered since."""
        self.closed = False
        self.epoch = 0
        self.session_no = 0
        """Counts sessions: numbers of leases and reservations mean something only within one."""
        self.numbers: dict[tuple[bytes, bool, int], int] = {}
        """Numbers of namespaces in this session, by their handles' identity; a new session has a new dict."""
        self.socket_no = 0
        """Counts sockets: a descriptor's number may come again."""
        self.token = b""
        self.arena_path = ""
        self.max_batch = MAX_BATCH
        self.max_message_bytes = 1 << 20
        self.refusal: RequestError | None = None
        """Why the daemon would not have us, where it said so."""
        self.orphans = Orphans()
        self.lifeline = Lifeline()
        self._ids = itertools.count(1)
        self.waited = Waited()
        self._handed_over = HandedOver(self.counters)
        self._hello_ids: list[int] = []
        self._hello_ns = 0
        self._opened_ns = 0
        self._used = False
        self._draining = False
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None

    # The socket

    def open(self) -> None:
        """Make a fresh socket and start connecting; nothing of an earlier one can be delivered any more."""
        self._close_socket()
        if self._context is None:
            self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        # IMMEDIATE: queue only for a daemon that is there; a request must not wait for one that comes later.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        if self._curve is not None:
            self._curve.secure(socket)
        socket.connect(self.endpoint)
        self._socket = socket
        self.socket_no += 1
        self._opened_ns = time.monotonic_ns()
        self._used = False
        self._hello_ids.clear()

    def fileno(self) -> int:
        """ZeroMQ's descriptor: readable when something may have happened, edges only."""
        assert self._socket is not None
        return int(self._socket.getsockopt(zmq.FD))

    @property
    def is_open(self) -> bool:
        """Whether there is a socket."""
        return self._socket is not None

    def close(self) -> None:
        """Close for good."""
        self.closed = True
        self.up = False
        self._close_socket()
        if self._context is not None:
            self._context.term()
            self._context = None

    def abandon(self) -> None:
        """After a fork, in the child: the socket, the session and all that waits belong to the parent."""
        self.lock = threading.RLock()  # the parent's may have been held by a thread that does not exist here
        self._socket = None
        self._context = None
        self.up = False
        self.token = b""
        self.session_no += 1
        self.numbers = {}
        self.waited.clear()
        self._handed_over.forget()
        self._hello_ids.clear()
        self._draining = False
        self.lifeline.drop()
        self.orphans.clear()

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None

    # The session

    def step(self, now_ns: int) -> bool:
        """Go one step towards a session without waiting; True when there is one."""
        if self.closed:
            raise Unavailable("the client is closed")
        if self._socket is None:
            self.open()
        self.drain()  # the answer to our Hello may be there
        if self.up or self.refused(now_ns):
            return self.up
        if not self._hello_ids or now_ns - self._hello_ns > HELLO_PATIENCE_NS:
            self._say_hello(now_ns)
        return False

    def refused(self, now_ns: int) -> bool:
        """Whether the daemon said no to our Hello, just now."""
        return self.refusal is not None and now_ns - self._hello_ns < HELLO_PATIENCE_NS

    @property
    def hello_sent(self) -> bool:
        """Whether an answer to Hello is awaited: a daemon was there to take it."""
        return bool(self._hello_ids)

    def _say_hello(self, now_ns: int) -> None:
        if len(self._hello_ids) >= MAX_HELLOS:
            self.open()
        versions = (PROTOCOL_VERSION, PROTOCOL_VERSION)
        request = Hello(id=next(self._ids), versions=versions, client=self.name, resume=self.token)
        if self._transmit(encode(request), ()):
            self._hello_ids.append(request.id)
            self._hello_ns = now_ns
            self.refusal = None
        elif self._used and now_ns - self._opened_ns > FRESH_SOCKET_NS:
            self.open()  # the daemon that this socket reached is gone

    def hang_up(self) -> None:
        """The daemon has hung up, and its last replies are in: nobody waits any longer for those that stayed out."""
        self.counters["hang_ups"] += 1
        self.lose()
        self.waited.give_up()

    def lose(self) -> None:
        """A request got no answer in time: calls fail fast until the daemon answers a Hello on this socket."""
        self.lifeline.let_go_if_cut()
        if self.up:
            self.up = False
            self.silent = True
            self.counters["sessions_lost"] += 1
            self._hello_ids.clear()
            self._say_hello(time.monotonic_ns())

    def _welcome(self, reply: HelloReply) -> None:
        self._hello_ids.clear()
        self.refusal = None
        self.silent = False
        if reply.token != self.token or reply.epoch != self.epoch:
            self.session_no += 1
            self.numbers = {}
            self._handed_over.lose()
        self.epoch, self.token, self.arena_path = reply.epoch, reply.token, reply.arena
        self.orphans.welcomed(self.session_no, reply.token)
        self.max_batch, self.max_message_bytes = reply.max_batch, reply.max_message_bytes
        self.up = True
        self.counters["sessions"] += 1
        self._abort_orphans()

    def _abort_orphans(self) -> None:
        for session_no, reservation in self.orphans.taken():
            self.give_up(session_no, reservation)

    def give_up(self, session_no: int, reservation: int) -> None:
        """Say that nobody writes a reservation any more, also one of an earlier session; later if nobody is there."""
        request = self.orphans.abort(session_no, self.session_no, reservation)
        if request is not None and not self.post(request):
            self.orphans.add(session_no, reservation)

    # Requests and replies

    def submit(self, request: AnyRequest, frames: Sequence[Frame], deadline_ns: int, group: Group) -> Pending | None:
        """Send a request; None when the daemon is gone or its queue is full. The caller has seen `up`."""
        request.id = number = next(self._ids)
        request.epoch = self.epoch
        # Another machine has another clock: it is told how much time is left.
        request.deadline_ns = max(1, deadline_ns - time.monotonic_ns()) if self._curve else deadline_ns
        if not self._transmit(encode(request), frames):
            return None
        return self.waited.add(number, group, self.session_no)

    def post(self, request: AnyRequest) -> bool:
        """Send a request whose answer nobody waits for."""
        if not self.up:
            return False
        request.id = 0
        request.epoch = self.epoch
        sent = self._transmit(encode(request), ())
        self.drain()
        return sent

    def hand_over(self, request: Commit, frames: Sequence[Frame], blocks: int) -> bool:
        """Send a Commit that is answered only if it is refused, which is counted; False when it could not be sent."""
        if not self.up or self._handed_over.full:
            return False
        # A commit that is verified is served beside later requests: only its own answer tells what became of it.
        request.quiet = not request.verify
        request.id = number = next(self._ids)
        request.epoch = self.epoch
        sent = self._transmit(encode(request), frames)
        if sent:
            self._handed_over.add(number, blocks, quiet=request.quiet)
        self.drain()
        return sent

    def drain(self) -> None:
        """Take in every reply that is there.

        After everything sent, too: sending may swallow the edge that told of a reply, and whoever polls the descriptor
        for it would sleep on.
        """
        socket = self._socket
        if socket is None or self._draining:  # what is sent on behalf of a reply: the outer loop goes on reading
            return
        self._draining = True
        try:
            self._drain(socket)
        finally:
            self._draining = False

    def _drain(self, socket: zmq.Socket[bytes]) -> None:
        while not socket.closed and int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            header = socket.recv(zmq.NOBLOCK, copy=False)
            more = header.more
            frames = []
            while more:
                frame = socket.recv(zmq.NOBLOCK, copy=False)
                more = frame.more
                frames.append(frame.buffer)
            self._dispatch(header.buffer, frames)

    def _dispatch(self, header: memoryview, frames: list[memoryview]) -> None:
        try:
            reply = decode_reply(header)
        except msgspec.MsgspecError:
            self.counters["unreadable_replies"] += 1
            return
        self._handed_over.settle_before(reply.id)
        pending = self.waited.take(reply.id)
        if pending is None:
            self._take_unasked(reply)
            return
        if type(reply) is ErrorReply and pending.session_no == self.session_no and self.up:
            if reply.code in _SESSION_LOST:
                self.up, self.token = False, b""
            elif reply.code == ErrorCode.SHUTTING_DOWN:
                self.lose()
        pending.received = (reply, frames, pending.session_no)
        group = pending.group
        group.missing -= 1
        if group.missing == group.floor:
            group.wake()

    def _take_unasked(self, reply: AnyReply) -> None:
        match reply:
            case HelloReply() if reply.id in self._hello_ids:
                self._welcome(reply)
            case ErrorReply() if reply.id in self._hello_ids:
                self._hello_ids.clear()
                self.refusal = RequestError(reply.code, reply.message, reply.retry_after_ms)
            case ReserveReply() | AcquireReply() | SequenceReply() if reply.epoch == self.epoch:
                self.counters["late_replies"] += 1
                self.give_back_granted(reply)
            case _ if reply.id and not self._handed_over.settle(reply):
                self.counters["late_replies"] += 1

    def give_back_granted(self, reply: AnyReply) -> None:
        """End what a reply of this session granted to somebody who does not want it any more."""
        if (request := giving_back(reply)) is not None:
            request.epoch = self.epoch
            self._transmit(encode(request), ())

    def _transmit(self, header: bytes, frames: Sequence[Frame]) -> bool:
        socket = self._socket
        if socket is None:
            return False
        if not send_message(socket, header, frames):
            return False
        self._used = True
        return True
