"""A device that is a GPU: the pool in one allocation, streams for compute and each direction of copies, pinned memory.

None of this has run on a GPU yet: it is tested against a stand-in for the calls of CUDA that it makes (`Runtime`), and
`tests/gpu/run.sh` is what a machine with a GPU runs.

Every call names its GPU, because CUDA's current device is one per thread and a call on another one would make a context
there, which costs that GPU's owner hundreds of MiB. Host memory is registered in pieces, so that no call holds up the
driver and the process for long. A copy that crosses from one registered piece into the next is refused by CUDA,
therefore copies are cut at their edges.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import logging
import resource
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from kvtierd.core.checksum import Bytes
from kvtierd.core.errors import ExitCode, KvtierdError, StartupError
from kvtierd.core.units import MIB, PAGE_BYTES, format_bytes

PIECE_BYTES = 64 * MIB
"""Host memory is registered so many bytes at a time: some 10 ms a call."""
IPC_HANDLE_BYTES = 64
_log = logging.getLogger(__name__)


class CudaError(KvtierdError):
    """A call of CUDA failed; the text has CUDA's name of the error and which call it was."""


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """Device memory: its address there, and the object (torch's tensor) that keeps it."""

    pointer: int
    owner: Any


class Runtime(Protocol):
    """The calls of CUDA that a device makes; each makes `gpu` the thread's current device first.

    Each raises CudaError. `kvtierd.gpu.cuda_runtime` makes them with torch and CUDA's own bindings.
    """

    def device_count(self) -> int:
        """GPUs that this process may see; makes a context on none."""
        ...

    def allocate(self, gpu: int, count: int) -> Allocation:
        """`count` bytes of device memory in one allocation of its own."""
        ...

    def free(self, gpu: int, allocation: Allocation) -> None:
        """Give the memory back to the GPU."""
        ...

    def new_stream(self, gpu: int) -> Any:
        """A stream that does not wait for the default one."""
        ...

    def copy(self, gpu: int, target: int, source: int, count: int, stream: Any) -> None:
        """Begin a copy between any two addresses, as it stands in the stream."""
        ...

    def wait(self, gpu: int, stream: Any) -> None:
        """Return when what is in the stream now is done, without the GIL meanwhile."""
        ...

    def register(self, gpu: int, address: int, count: int) -> int:
        """Pin host memory and map it; returns its address on the device."""
        ...

    def unregister(self, gpu: int, address: int) -> None:
        """Undo `register`."""
        ...

    def export_handle(self, gpu: int, pointer: int) -> bytes:
        """The IPC handle of the allocation at a device address."""
        ...

    def open_handle(self, gpu: int, handle: bytes) -> int:
        """Map another process's allocation; returns its address here."""
        ...

    def close_handle(self, gpu: int, pointer: int) -> None:
        """Undo `open_handle`."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class SlotHandle:
    """Where another process finds a slot: the pool's IPC handle, and the slot's place in the pool.

    Whoever opens it can reach the whole pool, of all tenants: a handle is only for who may read all of it.
    """

    handle: bytes
    offset: int
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """Registered host memory: where it begins and ends, and where the device sees its begin."""

    begin: int
    end: int
    pointer: int


class CudaDevice:
    """One GPU's pool. Raises StartupError where there is no such GPU, or not so much memory.

    Copies may be called from several threads at once. `compute`, `to_device` and `to_host` are streams.
    """

    def __init__(self, gpu: int, capacity_bytes: int, runtime: Runtime) -> None:
        self.name, self.gpu, self.capacity_bytes = f"cuda:{gpu}", gpu, capacity_bytes
        self.address = 0  # the CPU does not reach the pool
        self._runtime = runtime
        count = runtime.device_count()
        if gpu >= count:
            there = f"there are {count}, cuda:0 to cuda:{count - 1}" if count else "there is none"
            raise StartupError(ExitCode.NO_DEVICE, f"gpu.device is 'cuda:{gpu}', and of GPUs {there}; use host")
        try:
            self._pool = runtime.allocate(gpu, capacity_bytes)
        except CudaError as error:
            wanted = f"gpu.capacity: {format_bytes(capacity_bytes)} cannot be had on cuda:{gpu}"
            raise StartupError(ExitCode.CONFIG, f"{wanted}: {error}; lower it, or write 0") from error
        self.compute, self.to_device, self.to_host = (runtime.new_stream(gpu) for _ in range(3))
        self._lock = threading.Lock()
        self._pieces: list[_Piece] = []
        self._opened: dict[str, dict[bytes, int]] = {}

    @property
    def pool(self) -> Any:
        """What owns the pool: torch's uint8 tensor, which Numba takes as an array."""
        return self._pool.owner

    @property
    def pointer(self) -> int:
        """The pool's address on the device."""
        return self._pool.pointer

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that are registered."""
        with self._lock:
            return sum(piece.end - piece.begin for piece in self._pieces)

    def copy_in(self, offset: int, source: Bytes) -> None:
        """Copy host bytes into the pool at `offset`. Raises ValueError beyond the pool, CudaError."""
        self._copy(offset, source, self.to_device, inwards=True)

    def copy_out(self, offset: int, target: Bytes) -> None:
        """Copy pool bytes at `offset` into host memory. Raises as `copy_in`."""
        self._copy(offset, target, self.to_host, inwards=False)

    def register_host(self, memory: Bytes) -> bool:
        """Pin host memory, all of it or none; False, and a warning with what to do, where that is not allowed."""
        try:
            for _ in self.register_pieces(memory):
                pass
        except CudaError as error:
            self.unregister_host(memory)
            _log.warning("%s", error)
            return False
        return True

    def register_pieces(self, memory: Bytes) -> Iterator[int]:
        """Pin host memory piece by piece, and say after each how many bytes are; copies may go on meanwhile.

        Raises CudaError, with what to do, in the midst (what was pinned stays until `unregister_host`), ValueError for
        memory that does not begin on a page.
        """
        begin, end = memory.ctypes.data, memory.ctypes.data + memory.size
        if begin % PAGE_BYTES:
            raise ValueError(f"host memory at {begin:#x} does not begin on a page")
        for at in range(begin, end, PIECE_BYTES):
            after = min(at + PIECE_BYTES, end)
            try:
                piece = _Piece(at, after, self._runtime.register(self.gpu, at, after - at))
            except CudaError as error:
                raise CudaError(_cannot_pin(memory.size, self.name, error)) from error
            with self._lock:
                bisect.insort(self._pieces, piece, key=lambda kept: kept.begin)
            yield after - begin

    def unregister_host(self, memory: Bytes) -> None:
        """Undo `register_host`, whatever of it was done; the memory may then be unmapped."""
        begin, end = memory.ctypes.data, memory.ctypes.data + memory.size
        with self._lock:
            gone = [piece for piece in self._pieces if begin <= piece.begin < end]
            self._pieces = [piece for piece in self._pieces if not begin <= piece.begin < end]
        for piece in gone:
            self._runtime.unregister(self.gpu, piece.begin)

    def device_pointer(self, memory: Bytes) -> int:
        """Where kernels read registered host memory in place. ValueError where it is not all registered in a row."""
        begin, end = memory.ctypes.data, memory.ctypes.data + memory.size
        with self._lock:
            pieces = self._within(begin, end)
        reached, first = begin, pieces[0].pointer - pieces[0].begin if pieces else 0
        for piece in pieces:
            if piece.begin > reached or piece.pointer - piece.begin != first:
                break
            reached = piece.end
        if reached < end:
            raise ValueError(f"{memory.size} bytes at {begin:#x} are not mapped in one row on {self.name}")
        return begin + first

    def export_slot(self, offset: int, count: int) -> SlotHandle:
        """What another process needs to open a slot. Raises ValueError beyond the pool, CudaError."""
        self._check(offset, count)
        return SlotHandle(self._runtime.export_handle(self.gpu, self._pool.pointer), offset, count)

    def open_handle(self, client: str, handle: bytes) -> int:
        """Map a client's allocation on this GPU, once however often it is named; `close_client` undoes it.

        Raises ValueError for what is no handle, CudaError for one that cannot be opened.
        """
        if len(handle) != IPC_HANDLE_BYTES:
            raise ValueError(f"an IPC handle has {IPC_HANDLE_BYTES} bytes; this one has {len(handle)}")
        with self._lock:
            opened = self._opened.setdefault(client, {})
            if handle not in opened:
                opened[handle] = self._runtime.open_handle(self.gpu, handle)
            return opened[handle]

    def has_client(self, client: str) -> bool:
        """Whether something that a client exported is mapped here."""
        with self._lock:
            return client in self._opened

    def close_client(self, client: str) -> int:
        """Unmap all that a client exported, when it has gone; returns how much that was.

        What still copies from there must have ended: the streams of copies are waited for.
        """
        with self._lock:
            opened = self._opened.pop(client, {})
        if opened:
            for stream in (self.compute, self.to_device, self.to_host):
                self._runtime.wait(self.gpu, stream)
        for pointer in opened.values():
            self._runtime.close_handle(self.gpu, pointer)
        return len(opened)

    def close(self) -> None:
        """Unmap, unpin and free everything; nothing may use the device any more."""
        for client in list(self._opened):
            self.close_client(client)
        with self._lock:
            pieces, self._pieces = self._pieces, []
        for piece in pieces:
            self._runtime.unregister(self.gpu, piece.begin)
        self._runtime.free(self.gpu, self._pool)

    def _copy(self, offset: int, memory: Bytes, stream: Any, *, inwards: bool) -> None:
        self._check(offset, memory.size)
        begin = memory.ctypes.data
        for at, after in self._cut(begin, begin + memory.size):
            there = self._pool.pointer + offset + at - begin
            target, source = (there, at) if inwards else (at, there)
            self._runtime.copy(self.gpu, target, source, after - at, stream)
        self._runtime.wait(self.gpu, stream)

    def _cut(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The range cut at the edges of registered pieces."""
        with self._lock:
            pieces = self._within(begin, end)
        edges = {edge for piece in pieces for edge in (piece.begin, piece.end) if begin < edge < end}
        bounds = [begin, *sorted(edges), end]
        return [(at, after) for at, after in itertools.pairwise(bounds) if after > at]

    def _within(self, begin: int, end: int) -> list[_Piece]:
        """Registered pieces that a range touches, in order. The lock is held."""
        first = max(bisect.bisect_right(self._pieces, begin, key=lambda piece: piece.begin) - 1, 0)
        last = bisect.bisect_left(self._pieces, end, key=lambda piece: piece.begin)
        return [piece for piece in self._pieces[first:last] if piece.end > begin]

    def _check(self, offset: int, count: int) -> None:
        if not 0 <= offset <= offset + count <= self.capacity_bytes:
            raise ValueError(f"bytes {offset}..{offset + count} are not within the pool's {self.capacity_bytes}")


def _cannot_pin(count: int, name: str, error: CudaError) -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
    return (
        f"{format_bytes(count)} of host memory cannot be pinned for {name}: {error}. The limit of locked memory is "
        f"{allowed}: set LimitMEMLOCK=infinity (systemd) or ulimit -l unlimited. Copies go on unpinned, and slower"
    )
