"""A device that is a GPU: the pool in one allocation, streams for compute and each direction of copies, pinned memory.

None of this has run on a GPU yet: it is tested against a stand-in for the calls of CUDA that it makes (`Runtime`), and
`tests/gpu/run.sh` is what a machine with a GPU runs.

Every call names its GPU, because CUDA's current device is one per thread and a call on another one would make a context
there, which costs that GPU's owner hundreds of MiB. Host memory is registered in pieces, so that no call holds up the
driver and the process for long (`cuda_pins`).
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import resource
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtierd.core.checksum import Bytes
from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.core.units import MIB, PAGE_BYTES, format_bytes
from kvtierd.gpu.attend import Array, AttentionDevice
from kvtierd.gpu.cuda_interface import CudaError, Runtime
from kvtierd.gpu.cuda_pins import Piece, Pins

if TYPE_CHECKING:
    from kvtierd.gpu.attend_cuda import CudaAttention

PIECE_BYTES = 64 * MIB
"""Host memory is registered so many bytes at a time: some 10 ms a call."""
IPC_HANDLE_BYTES = 64
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class SlotHandle:
    """Where another process finds a slot: the pool's IPC handle, and the slot's place in the pool.

    Whoever opens it can reach the whole pool, of all tenants: a handle is only for who may read all of it.
    """

    handle: bytes
    offset: int
    count: int


class CudaDevice:
    """One GPU's pool. Raises StartupError where there is no such GPU, or not so much memory.

    Copies may be called from several threads at once. `compute`, `to_device` and `to_host` are streams.
    """

    def __init__(self, gpu: int, capacity_bytes: int, runtime: Runtime) -> None:
        self.name, self.gpu, self.capacity_bytes = f"cuda:{gpu}", gpu, capacity_bytes
        self.address = 0  # the CPU does not reach the pool
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
        self.compute_address = self._pool.pointer  # one space of addresses: no host memory has these
        self.runtime = runtime
        self._lock = threading.Lock()
        self._pins = Pins()
        self._attention: CudaAttention | None = None
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
        return self._pins.total_bytes

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
                self._pins.add(Piece(at, after, self.runtime.register(self.gpu, at, after - at)))
            except CudaError as error:
                raise CudaError(_cannot_pin(memory.size, self.name, error)) from error
            yield after - begin

    def unregister_host(self, memory: Bytes) -> None:
        """Undo `register_host`, whatever of it was done; the memory may then be unmapped."""
        begin, end = memory.ctypes.data, memory.ctypes.data + memory.size
        for piece in self._pins.take(begin, end):
            self.runtime.unregister(self.gpu, piece.begin)

    def device_pointer(self, memory: Bytes) -> int:
        """Where kernels read registered host memory in place. ValueError where it is not all registered in a row."""
        where = np.array([memory.ctypes.data, memory.size], np.uint64)
        found = int(self._pins.mapped(where[:1], where[1:])[0])
        if not found:
            raise ValueError(f"{memory.size} bytes at {where[0]:#x} are not mapped in one row on {self.name}")
        return found

    def mapped(self, addresses: Array, sizes: Array) -> Array:
        """The same for many ranges, uint64 [n] of uint64 [n]; 0 for each that is not mapped."""
        return self._pins.mapped(addresses, sizes)

    def attention(self, on_host: AttentionDevice) -> AttentionDevice:
        """CUDA kernels for blocks in the pool and in host memory; `on_host` has what there is no kernel for.

        `to_prepare` of it says what loads the kernels. Raises CudaError where there is no memory for them to work in.
        """
        if self._attention is None:
            self._attention = importlib.import_module("kvtierd.gpu.attend_cuda").CudaAttention(self, on_host)
        return self._attention

    def begin_copy(self, there: int, memory: int, count: int, stream: Any, *, inwards: bool) -> None:
        """Begin copying from host memory to the device (or back), cut where CUDA would refuse it. Raises CudaError."""
        for at, after in self._pins.cut(memory, memory + count):
            on_device = there + at - memory
            target, source = (on_device, at) if inwards else (at, on_device)
            self.runtime.copy(self.gpu, target, source, after - at, stream)

    def export_slot(self, offset: int, count: int) -> SlotHandle:
        """What another process needs to open a slot. Raises ValueError beyond the pool, CudaError."""
        self._check(offset, count)
        return SlotHandle(self.runtime.export_handle(self.gpu, self._pool.pointer), offset, count)

    def open_handle(self, client: str, handle: bytes) -> int:
        """Map a client's allocation on this GPU, once however often it is named; `close_client` undoes it.

        Raises ValueError for what is no handle, CudaError for one that cannot be opened.
        """
        if len(handle) != IPC_HANDLE_BYTES:
            raise ValueError(f"an IPC handle has {IPC_HANDLE_BYTES} bytes; this one has {len(handle)}")
        with self._lock:
            opened = self._opened.setdefault(client, {})
            if handle not in opened:
                opened[handle] = self.runtime.open_handle(self.gpu, handle)
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
                self.runtime.wait(self.gpu, stream)
        for pointer in opened.values():
            self.runtime.close_handle(self.gpu, pointer)
        return len(opened)

    def close(self) -> None:
        """Unmap, unpin and free everything; nothing may use the device any more."""
        for client in list(self._opened):
            self.close_client(client)
        if self._attention is not None:
            self._attention.close()
        for piece in self._pins.take():
            self.runtime.unregister(self.gpu, piece.begin)
        self.runtime.free(self.gpu, self._pool)

    def _copy(self, offset: int, memory: Bytes, stream: Any, *, inwards: bool) -> None:
        self._check(offset, memory.size)
        self.begin_copy(self._pool.pointer + offset, memory.ctypes.data, memory.size, stream, inwards=inwards)
        self.runtime.wait(self.gpu, stream)

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
