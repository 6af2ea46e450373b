"""The client's side of the shared arena: chunks are mapped when a block in them is first met (SPEC.md §8)."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import threading
import time

import msgspec
import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Bytes
from kvtierd.core.errors import KvtierdError
from kvtierd.protocol.mapping import SharedMapping
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

MAX_CHUNKS = 4096
MAX_CHUNK_BYTES = 4 << 30
MAX_MESSAGE_BYTES = 4096
_GENERATION_BYTES = 8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

_decode = msgspec.msgpack.Decoder(AnyArenaReply).decode
_encode = msgspec.msgpack.Encoder().encode


class ArenaError(KvtierdError):
    """The arena cannot be used, and why; frames still can."""


class MappedChunk:
    """One chunk in our address space: `data` [chunk_bytes] uint8 and `generations` [slots] u64, read-only.

    The memory stays mapped as long as any view into it lives.
    """

    def __init__(self, reply: ArenaChunk, data_fd: int, generations_fd: int) -> None:
        first = reply.generations_first
        if first < 0:
            raise ArenaError(f"a chunk whose generations begin at entry {first} of their file is refused")
        table_bytes = (first + reply.slots) * _GENERATION_BYTES
        _check_file("data", data_fd, reply.chunk_bytes)
        _check_file("generations", generations_fd, table_bytes)
        self.slot_bytes = reply.slot_bytes
        self.data: Bytes = np.asarray(SharedMapping(data_fd, reply.chunk_bytes, writable=True))
        table: Bytes = np.asarray(SharedMapping(generations_fd, table_bytes, writable=False))
        self.generations: npt.NDArray[np.uint64] = table.view("<u8")[first:]

    def view(self, offset: int, nbytes: int) -> Bytes:
        """Bytes of one slot. Raises ArenaError when they do not lie in the chunk."""
        if offset + nbytes > self.data.size or offset // self.slot_bytes >= self.generations.size:
            raise ArenaError(f"a slot of {nbytes} bytes at {offset} is outside its chunk of {self.data.size}")
        return self.data[offset : offset + nbytes]


class Arena:
    """An attachment to the arena socket. Thread-safe; `map` blocks up to its deadline, views need no call."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._lock = threading.Lock()
        self._chunks: dict[int, MappedChunk] = {}

    @classmethod
    def attach(cls, path: str, token: bytes, deadline_ns: int) -> Arena:
        """Connect and prove the session. Raises ArenaError with the daemon's reason."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        arena = cls(sock)
        try:
            sock.connect(path)
            arena._send(ArenaHello(token))
            reply, descriptors = arena._receive(deadline_ns)
            _close_all(descriptors)
        except (OSError, ArenaError) as error:
            sock.close()
            raise ArenaError(f"cannot attach to {path}: {error}") from error
        if not isinstance(reply, ArenaReady):
            sock.close()
            reason = reply.message if isinstance(reply, ArenaRefused) else f"it answered {type(reply).__name__}"
            raise ArenaError(f"the daemon refused the arena: {reason}")
        return arena

    def chunk(self, number: int) -> MappedChunk | None:
        """A chunk that is mapped already."""
        return self._chunks.get(number)

    def map(self, number: int, deadline_ns: int) -> MappedChunk:
        """Map a chunk. Raises ArenaError when it is gone, too large, unsealed, or the daemon does not answer."""
        with self._lock:
            known = self._chunks.get(number)
            if known is not None:
                return known
            self._forget_gone()
            if len(self._chunks) >= MAX_CHUNKS:
                raise ArenaError(f"{MAX_CHUNKS} chunks are mapped, which is the limit")
            try:
                self._send(ArenaMap(number))
                return self._await_chunk(number, deadline_ns)
            except OSError as error:
                raise ArenaError(f"cannot map chunk {number}: {error}") from error

    def _await_chunk(self, number: int, deadline_ns: int) -> MappedChunk:
        while True:
            reply, descriptors = self._receive(deadline_ns)
            try:
                match reply:
                    case ArenaChunk(chunk=got) if got == number and len(descriptors) == 2:
                        chunk = self._chunks[number] = MappedChunk(reply, *descriptors)
                        return chunk
                    case ArenaChunk(chunk=got) if got == number:
                        raise ArenaError("a chunk came without its two files; is the limit of open files reached?")
                    case ArenaGone(chunk=got):
                        self._chunks.pop(got, None)
                        if got == number:
                            raise ArenaError(f"chunk {number} is no longer part of the arena")
                    case ArenaRefused(message=reason):
                        raise ArenaError(reason)
            finally:
                _close_all(descriptors)

    def _forget_gone(self) -> None:
        """Take in what the daemon said unasked."""
        while _readable(self.socket, 0):
            reply, descriptors = self._receive(0)
            _close_all(descriptors)
            if isinstance(reply, ArenaGone):
                self._chunks.pop(reply.chunk, None)

    def _send(self, request: AnyArenaRequest) -> None:
        self.socket.send(_encode(request), socket.MSG_NOSIGNAL)

    def _receive(self, deadline_ns: int) -> tuple[AnyArenaReply, list[int]]:
        left_ms = max(0, (deadline_ns - time.monotonic_ns()) // 1_000_000)
        if not _readable(self.socket, int(left_ms)):
            raise ArenaError("the daemon did not answer on the arena socket in time")
        data, descriptors, _, _ = socket.recv_fds(self.socket, MAX_MESSAGE_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
        try:
            if not data:
                raise ArenaError("the daemon closed the arena socket")
            return _decode(data), descriptors
        except msgspec.MsgspecError as error:
            _close_all(descriptors)
            raise ArenaError(f"an unreadable message on the arena socket: {error}") from error
        except ArenaError:
            _close_all(descriptors)
            raise

    def let_go(self) -> None:
        """The daemon is gone: its memory goes with the last view into it, and none is mapped any more."""
        self._chunks.clear()

    def close(self) -> None:
        """Hang up; the daemon ends the session. Mappings go with their last view."""
        self.socket.close()
        self._chunks.clear()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's socket without a word on it."""
        self._lock = threading.Lock()
        self.close()


def _check_file(name: str, descriptor: int, nbytes: int) -> None:
    """A file that could shrink under the mapping would kill us with SIGBUS."""
    if not 0 < nbytes <= MAX_CHUNK_BYTES:
        raise ArenaError(f"a chunk with {nbytes} bytes of {name} is refused: the limit is {MAX_CHUNK_BYTES}")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ArenaError(f"the {name} of a chunk cannot be sealed: {error.strerror}") from error
    if seals & _SEALS != _SEALS:
        raise ArenaError(f"the {name} of a chunk is not sealed against resizing")
    if (size := os.fstat(descriptor).st_size) < nbytes:
        raise ArenaError(f"the {name} of a chunk has {size} bytes; {nbytes} are announced")


def _readable(sock: socket.socket, timeout_ms: int) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(timeout_ms))


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    descriptors.clear()
