"""The endpoint for other machines: `tcp://` with CURVE, where a client's key says what tenant it is (SPEC.md §2).

Nobody gets through the handshake whose key is not in the list: we answer ZeroMQ's question about each connection (ZAP,
RFC 27), and the key that it then attests to every message is the one a session belongs to. There is no arena here.
"""

from __future__ import annotations

import asyncio
import collections
import ctypes
import logging
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

import zmq
from zmq.utils import z85

from kvtierd.core.clock import Clock
from kvtierd.core.errors import ErrorCode, ExitCode, RequestError, StartupError
from kvtierd.protocol.curve import KeyPair
from kvtierd.protocol.gate import ConnectionGate
from kvtierd.protocol.messages import AnyRequest, Hello
from kvtierd.protocol.server import Server
from kvtierd.protocol.service import Observer, Service, Session
from kvtierd.protocol.sessions import Life, Limits, Peer, SessionTable

log = logging.getLogger(__name__)

DOMAIN = b"kvtierd"
HANDSHAKE_MS = 5000
"""A connection that has not proved who it is by then is closed."""
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 5000, 15000
"""A machine that lost power does not say goodbye."""
BACKLOG = 128

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_FRAMES = 7
"""Version, request, domain, address, identity, mechanism, key."""
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)
"""The classic BPF program that lets no packet through (linux/filter.h: BPF_RET | BPF_K, 0)."""


class KeyedSessions(SessionTable):
    """Sessions of clients that are known by their keys. `speaker` is the key of whoever says hello now."""

    speaker = ""
    allowed: Mapping[str, str] = {}
    """Tenants by public key."""
    sessions_max: Mapping[str, int] = {}
    """By tenant; those that are not named have the limit of the endpoint."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._keys: dict[int, str] = {}
        """Of open sessions, by their numbers."""
        self._counts: collections.Counter[str] = collections.Counter()

    def hello(self, rid: bytes, request: Hello) -> Peer:
        """As SessionTable; `unavailable` where the key has been taken off the list since the handshake."""
        tenant = self.allowed.get(self.speaker)
        if tenant is None:
            raise RequestError(ErrorCode.UNAVAILABLE, "the key of this connection is not allowed any more")
        self._tenant = tenant
        known = self.by_token(request.resume) if request.resume else None
        if known is not None and self._keys.get(known.session.id) != self.speaker:
            request.resume = b""  # as one that nobody has
        peer = super().hello(rid, request)
        if peer.session.id not in self._keys:
            self._keys[peer.session.id] = self.speaker
            self._counts[tenant] += 1
        return peer

    def end(self, peer: Peer) -> None:
        """As SessionTable."""
        if self._keys.pop(peer.session.id, None) is not None:
            self._counts[peer.session.tenant] -= 1
        super().end(peer)

    def end_disallowed(self) -> None:
        """End sessions of keys that are not on the list any more, or are another tenant's."""
        for peer in self:
            if self.allowed.get(self._keys.get(peer.session.id, "")) != peer.session.tenant:
                self.end(peer)

    def _room(self) -> int:
        return self.sessions_max.get(self._tenant, self._limits.max_sessions) - self._counts[self._tenant]


class FilteredPort:
    """A listening TCP socket: it is shut by having the kernel drop what comes to it; connections do not notice."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener

    def shut(self) -> None:
        """Let nobody else in."""
        code = ctypes.create_string_buffer(_RETURN_NOTHING)
        program = struct.pack("HL", 1, ctypes.addressof(code))
        self._listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)

    def open(self) -> None:
        """Let people in again."""
        self._listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)

    def close(self) -> None:
        """There will be no way in any more: ZeroMQ closes the port with its own copy."""
        self._listener.close()


class RemoteServer(Server):
    """One endpoint for the remote clients of all tenants. `allowed` are tenants by public key."""

    _sessions_kind = KeyedSessions
    sessions: KeyedSessions

    def __init__(
        self,
        service: Service,
        address: str,
        keys: KeyPair,
        allowed: Mapping[str, str],
        *,
        limits: Limits | None = None,
        sessions_max: Mapping[str, int] | None = None,
        clock: Clock | None = None,
        name: str = "kvtierd",
        observer: Observer | None = None,
        life: Life | None = None,
    ) -> None:
        super().__init__(
            service, Path(), tenant="", limits=limits, clock=clock, name=name, observer=observer, life=life
        )  # fmt: skip
        self.endpoint = f"tcp://{address}"
        self._address = address
        self._pair = keys
        self.sessions.allowed = dict(allowed)
        self.sessions.sessions_max = sessions_max or {}

    def allow(self, allowed: Mapping[str, str]) -> None:
        """Take another list of keys over: sessions of those that are not on it end."""
        self.sessions.allowed = dict(allowed)
        self.sessions.end_disallowed()

    def _prepare(self, *, replace_stale: bool) -> None:  # noqa: ARG002 - a port leaves nothing behind
        """Take the port. Raises StartupError (74)."""
        host, _, port = self._address.rpartition(":")
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        bare = "" if host == "*" else host.strip("[]")
        try:
            self._listener = socket.create_server((bare, int(port)), family=family, backlog=BACKLOG)
        except (OSError, OverflowError) as error:
            raise StartupError(ExitCode.IO, f"server.tcp: cannot listen on {self._address}: {error}") from error
        self._listener.setblocking(False)  # noqa: FBT003 - it has no other form
        self.endpoint = f"tcp://{host}:{self._listener.getsockname()[1]}"

    def _open_socket(self) -> zmq.Socket[bytes]:
        # Before the first connection can ask: without an answer to its question ZeroMQ lets every key in.
        self._asker = _Asker(self._context, self.sessions, self.counters)
        endpoint = self._new_socket()
        endpoint.setsockopt(zmq.CURVE_SERVER, 1)
        endpoint.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret.encode())
        endpoint.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        endpoint.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        endpoint.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        endpoint.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        endpoint.setsockopt(zmq.IPV6, int(self._listener.family == socket.AF_INET6))
        endpoint.setsockopt(zmq.USE_FD, self._listener.dup().detach())
        try:
            endpoint.bind(self.endpoint)
        except zmq.ZMQError as error:
            endpoint.close(0)
            self._asker.close()
            self._listener.close()
            raise StartupError(ExitCode.IO, f"cannot bind {self.endpoint}: {error}") from error
        return endpoint

    def _let_go(self) -> None:
        self._asker.close()

    def _open_gate(self, limit: int) -> ConnectionGate:
        return ConnectionGate(self._socket, FilteredPort(self._listener), limit)

    def _check(self, rid: bytes, request: AnyRequest, header: zmq.Frame, nbytes: int, count: int) -> None:
        super()._check(rid, request, header, nbytes, count)
        if request.deadline_ns > 0:
            request.deadline_ns += self._clock.now_ns()  # the clocks of two machines have nothing in common
        if type(request) is Hello:
            self.sessions.speaker = str(header.get("User-Id"))

    def _session_ended(self, session: Session) -> None:
        """There is no arena to tell."""


class _Asker:
    """Answers ZeroMQ's question about each new connection, on the loop."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], sessions: KeyedSessions, counters: dict[str, int]
    ) -> None:
        self._sessions = sessions
        self._counters = counters
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ENDPOINT)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._drain)

    def close(self) -> None:
        """Answer nothing any more."""
        self._loop.remove_reader(self._fd)
        self._socket.close(0)

    def _drain(self) -> None:
        """Take every question: the descriptor tells only of the first of several."""
        while True:
            try:
                *route, empty, version, number, domain, address, _, mechanism, key = self._socket.recv_multipart(
                    zmq.NOBLOCK
                )
            except zmq.Again:
                return
            name = z85.encode(key).decode() if (mechanism, len(key)) == (b"CURVE", 32) else ""
            good = domain == DOMAIN and name in self._sessions.allowed
            if not good:
                self._counters["curve_refused_total"] += 1
                log.warning("a client at %s was refused: its key %s is in no tenant's list", address.decode(), name)
            status, text = (b"200", b"OK") if good else (b"400", b"this key is in no tenant's list")
            self._socket.send_multipart(
                [*route, empty, version, number, status, text, name.encode() if good else b"", b""]
            )
