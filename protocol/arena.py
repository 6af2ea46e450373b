"""The client's side of the shared arena: chunks are mapped when a block in them is first met (SPEC.md §8)."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import socket
import threading
import time
import weakref

import msgspec
import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Bytes
from kvtierd.core.errors import KvtierdError
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
        table_bytes = reply.slots * _GENERATION_BYTES
        _check_file("data", data_fd, reply.chunk_bytes)
        _check_file("generations", generations_fd, table_bytes)
        self.slot_bytes = reply.slot_bytes
        data = mmap.mmap(data_fd, reply.chunk_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        table = mmap.mmap(generations_fd, table_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self.data: Bytes = np.frombuffer(data, np.uint8)
        self.generations: npt.NDArray[np.uint64] = np.frombuffer(table, "<u8")
        _keep_out_of_children(data, self.data)
        _keep_out_of_children(table, self.generations)

    def view(self, offset: int, nbytes: int) -> Bytes:
        """Bytes of one slot. Raises ArenaError when they do not lie in the chunk."""
        if offset + nbytes > self.data.size or offset // self.slot_bytes >= self.generations.size:
            raise ArenaError(f"a slot of {nbytes} bytes at {offset} is outside its chunk of {self.data.size}")
        return self.data[offset : offset + nbytes]


class Arena:
    """An attachment to the arena socket. Thread-safe; `map` blocks up to its deadline, views need no call."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
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
                raise ArenaError(f"the arena socket failed: {error}") from error

    def _await_chunk(self, number: int, deadline_ns: int) -> MappedChunk:
        while True:
            reply, descriptors = self._receive(deadline_ns)
            try:
                match reply:
                    case ArenaChunk(chunk=got) if got == number and len(descriptors) == 2:
                        chunk = self._chunks[number] = MappedChunk(reply, *descriptors)
                        return chunk
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
        while _readable(self._socket, 0):
            reply, descriptors = self._receive(0)
            _close_all(descriptors)
            if isinstance(reply, ArenaGone):
                self._chunks.pop(reply.chunk, None)

    def _send(self, request: AnyArenaRequest) -> None:
        self._socket.send(_encode(request), socket.MSG_NOSIGNAL)

    def _receive(self, deadline_ns: int) -> tuple[AnyArenaReply, list[int]]:
        left_ms = max(0, (deadline_ns - time.monotonic_ns()) // 1_000_000)
        if not _readable(self._socket, int(left_ms)):
            raise ArenaError("the daemon did not answer on the arena socket in time")
        data, descriptors, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
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

    def close(self) -> None:
        """Hang up; the daemon ends the session. Mappings go with their last view."""
        self._socket.close()
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


_mappings: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, int]] = weakref.WeakKeyDictionary()
"""Address and length of every mapping that lives; the weak key goes with its last view."""

_MAP_FIXED_NOREPLACE = 0x100000  # asm-generic/mman-common.h, Linux 4.17
_MAP_NORESERVE = 0x4000
_libc_mmap = ctypes.CDLL(None).mmap
_libc_mmap.restype = ctypes.c_void_p
_libc_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def _keep_out_of_children(mapping: mmap.mmap, view: npt.NDArray[np.generic]) -> None:
    # A forked child that kept writing after its parent's end would write into slots that changed hands.
    mapping.madvise(mmap.MADV_DONTFORK)
    _mappings[mapping] = (view.ctypes.data, view.nbytes)


def _fill_holes() -> None:
    """In a forked child: occupy the addresses of mappings that did not come along.

    Python still owns these mmap objects and will unmap their addresses one day; by then the allocator could have put
    memory of the child's own there.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
    for address, nbytes in list(_mappings.values()):
        _libc_mmap(address, nbytes, 0, flags, -1, 0)


os.register_at_fork(after_in_child=_fill_holes)
