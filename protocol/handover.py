"""The arena socket, the daemon's side: who a client is, by the kernel's word, and its chunks' descriptors (SPEC.md §8).

A SOCK_SEQPACKET Unix socket beside the ZeroMQ endpoint. It also tells us when a client is gone: end of file ends the
session, and the end of the process, which a pidfd reports, says that no mapping of it can be written any more.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import select
import socket
import struct
from pathlib import Path

import msgspec

from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.protocol.endpoint import prepare_path, set_mode
from kvtierd.protocol.messages import (
    AnyArenaReply,
    AnyArenaRequest,
    ArenaChunk,
    ArenaGone,
    ArenaHello,
    ArenaMap,
    ArenaReady,
    ArenaRefused,
)
from kvtierd.protocol.service import ChunkSource, Service, Session
from kvtierd.protocol.sessions import Peer, SessionTable

log = logging.getLogger(__name__)

MAX_ARENA_MESSAGE_BYTES = 4096
BACKLOG = 64
MAX_DETACHED = 64
"""Ended sessions of one living process that still wait for its end."""

_UCRED = struct.Struct("3i")
_INT = struct.Struct("i")
_SO_PEERPIDFD = 77  # asm-generic/socket.h, Linux 6.5

_decode = msgspec.msgpack.Decoder(AnyArenaRequest).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclasses.dataclass(slots=True, eq=False)
class _Process:
    """A client process that lives, and all sessions that it attached; one pidfd however many these are."""

    pid: int
    pidfd: int
    sessions: list[Session] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, eq=False)
class _Connection:
    """One client's socket. `peer` is its session once it has said hello."""

    socket: socket.socket
    peer: Peer | None = None
    mapped: set[int] = dataclasses.field(default_factory=set)


class ArenaListener:
    """Listens for clients that want the arena. All methods run on the loop."""

    def __init__(
        self,
        path: Path,
        *,
        epoch: int,
        sessions: SessionTable,
        service: Service,
        chunks: ChunkSource,
        counters: dict[str, int],
        max_connections: int = 512,
    ) -> None:
        self.path = path
        self._epoch = epoch
        self._sessions = sessions
        self._service = service
        self._chunks = chunks
        self._counters = counters
        self._max_connections = max_connections
        self._connections: dict[int, _Connection] = {}
        self._processes: dict[int, _Process] = {}
        self._listener: socket.socket | None = None

    def start(self, *, replace_stale: bool) -> None:
        """Bind and listen. Raises StartupError when the path is taken or cannot be bound."""
        prepare_path(self.path, replace_stale=replace_stale)
        self._loop = asyncio.get_running_loop()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind(os.fspath(self.path))
            set_mode(self.path)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise StartupError(ExitCode.IO, f"cannot bind {self.path}: {error.strerror}") from error
        self._listener = listener
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Close every socket and pidfd and remove the path; nobody is told."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            self.path.unlink(missing_ok=True)
        for connection in list(self._connections.values()):
            self._close_connection(connection)
        for process in list(self._processes.values()):
            self._forget_process(process)

    def chunk_gone(self, chunk: int) -> None:
        """Tell everybody who maps a chunk that it has left the arena."""
        for connection in list(self._connections.values()):
            if chunk in connection.mapped:
                connection.mapped.discard(chunk)
                self._send(connection, ArenaGone(chunk))

    def session_ended(self, session: Session) -> None:
        """A session is over: hang up, and keep watching its process only if something of it is in quarantine."""
        for connection in list(self._connections.values()):
            if connection.peer is not None and connection.peer.session is session:
                self._close_connection(connection)
        process = self._processes.get(session.pid)
        if process is not None and session.quarantined == 0 and session in process.sessions:
            process.sessions.remove(session)
            session.pidfd = -1
            if not process.sessions:
                self._forget_process(process)

    # Connections

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors, or the client is gone already
            self._counters["arena_accept_errors_total"] += 1
            log.warning("cannot accept a client on %s: %s", self.path, error.strerror)
            return
        accepted.settimeout(0)
        connection = _Connection(accepted)
        if len(self._connections) >= self._max_connections:
            self._drop_idlest()
        if len(self._connections) >= self._max_connections:
            self._send_quietly(accepted, ArenaRefused(f"{self._max_connections} clients are attached: the limit"))
            accepted.close()
            return
        self._connections[accepted.fileno()] = connection
        self._loop.add_reader(accepted, self._readable, connection)

    def _drop_idlest(self) -> None:
        """Hang up on the oldest connection that has not said hello: idle ones must not keep clients out."""
        for connection in self._connections.values():
            if connection.peer is None:
                self._refuse(connection, "no arena_hello came, and others wait")
                return

    def _readable(self, connection: _Connection) -> None:
        try:
            # No room for control messages: the kernel closes descriptors that a client sends before we ever own them.
            data, _, flags, _ = connection.socket.recvmsg(MAX_ARENA_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data, flags = b"", 0
        if not data:
            self._hang_up(connection)
            return
        if flags & socket.MSG_TRUNC:
            self._refuse(connection, f"a message is longer than {MAX_ARENA_MESSAGE_BYTES} bytes")
            return
        try:
            request = _decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self._refuse(connection, "a message is neither arena_hello nor arena_map")
            return
        match request:
            case ArenaHello(token=token):
                self._attach(connection, token)
            case ArenaMap(chunk=chunk):
                self._map(connection, chunk)

    def _attach(self, connection: _Connection, token: bytes) -> None:
        peer = self._sessions.by_token(token)
        if peer is None or connection.peer is not None or peer.session.attached:
            self._refuse(connection, "the token is of no session that waits for its arena: say hello first")
            return
        pid, uid, _ = _UCRED.unpack(connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if pid <= 0:
            self._refuse(
                connection, "your process is not visible from the daemon's pid namespace: share it, or use frames"
            )
            return
        process = self._process(connection.socket, pid)
        if isinstance(process, str):
            self._refuse(connection, process)
            return
        session = peer.session
        process.sessions.append(session)
        session.pid, session.uid, session.pidfd = pid, uid, process.pidfd
        connection.peer = peer
        self._counters["arena_attached_total"] += 1
        self._send(connection, ArenaReady(self._epoch))

    def _map(self, connection: _Connection, chunk: int) -> None:
        if connection.peer is None:
            self._refuse(connection, "arena_hello comes first")
            return
        files = self._chunks.chunk_files(connection.peer.session, chunk)
        if files is None:
            self._send(connection, ArenaGone(chunk))
            return
        connection.mapped.add(chunk)
        shape = (files.chunk_bytes, files.slot_bytes, files.slots, files.generations_first)
        reply = ArenaChunk(files.chunk, *shape)
        self._send(connection, reply, (files.data_fd, files.generations_fd))

    def _send(self, connection: _Connection, reply: AnyArenaReply, descriptors: tuple[int, ...] = ()) -> None:
        """Send or hang up: a client that does not read its socket costs only itself."""
        if not self._send_quietly(connection.socket, reply, descriptors):
            self._hang_up(connection)

    @staticmethod
    def _send_quietly(target: socket.socket, reply: AnyArenaReply, descriptors: tuple[int, ...] = ()) -> bool:
        try:
            socket.send_fds(target, [_encode(reply)], list(descriptors), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def _refuse(self, connection: _Connection, reason: str) -> None:
        self._counters["arena_refused_total"] += 1
        self._send_quietly(connection.socket, ArenaRefused(reason))
        self._hang_up(connection)

    def _hang_up(self, connection: _Connection) -> None:
        self._close_connection(connection)
        if connection.peer is not None:
            self._sessions.end(connection.peer)

    def _close_connection(self, connection: _Connection) -> None:
        if self._connections.pop(connection.socket.fileno(), None) is not None:
            self._loop.remove_reader(connection.socket)
            connection.socket.close()

    # Processes

    def _process(self, client: socket.socket, pid: int) -> _Process | str:
        """The process behind a socket, or why it cannot have the arena."""
        known = self._processes.get(pid)
        if known is not None and _has_ended(known.pidfd):
            self._process_gone(known)
            known = None
        if known is not None:
            detached = sum(self._sessions.by_token(session.token) is None for session in known.sessions)
            if detached >= MAX_DETACHED:
                return f"{detached} sessions of your process still hold slots: abort their reservations"
            return known
        try:
            pidfd = _open_pidfd(client, pid)
        except OSError as error:
            return f"the daemon cannot watch your process {pid}: {error.strerror}"
        process = self._processes[pid] = _Process(pid, pidfd)
        self._loop.add_reader(pidfd, self._process_gone, process)
        return process

    def _process_gone(self, process: _Process) -> None:
        sessions = list(process.sessions)
        for session in sessions:
            peer = self._sessions.by_token(session.token)
            if peer is not None:
                self._sessions.end(peer)
        self._forget_process(process)
        for session in sessions:
            session.pidfd = -1
            self._service.process_gone(session)

    def _forget_process(self, process: _Process) -> None:
        if self._processes.get(process.pid) is process:
            del self._processes[process.pid]
            self._loop.remove_reader(process.pidfd)
            os.close(process.pidfd)


def _open_pidfd(client: socket.socket, pid: int) -> int:
    """A pidfd of the socket's peer: from the socket where the kernel can, which leaves no race with a reused pid."""
    try:
        raw = client.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, _INT.size)
        return int(_INT.unpack(raw)[0])
    except OSError:
        return os.pidfd_open(pid)


def _has_ended(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
