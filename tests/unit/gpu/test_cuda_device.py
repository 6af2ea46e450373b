"""The CUDA device against a stand-in for CUDA: what it makes where, and that it leaves nothing behind."""

from __future__ import annotations

import mmap
import subprocess
import sys

import numpy as np
import pytest

from kvtierd.config.schema import Gpu
from kvtierd.core.checksum import Bytes
from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.core.geometry import Geometry
from kvtierd.core.units import PAGE_BYTES
from kvtierd.gpu import cuda_device, open_device
from kvtierd.gpu.attend import Blocks, checked_query
from kvtierd.gpu.attend_host import HostAttention
from kvtierd.gpu.cuda_device import IPC_HANDLE_BYTES, CudaDevice
from kvtierd.gpu.cuda_interface import CudaError
from kvtierd.gpu.host_device import HostDevice
from tests.unit.gpu.fake_cuda import SHIFT, FakeRuntime

POOL = 1 << 20


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def device(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    monkeypatch.setattr(cuda_device, "PIECE_BYTES", 2 * PAGE_BYTES)
    return CudaDevice(1, POOL, runtime)


def host_memory(runtime: FakeRuntime, pages: int) -> Bytes:
    memory = np.frombuffer(mmap.mmap(-1, pages * PAGE_BYTES), np.uint8)
    memory[:] = np.random.default_rng(pages).integers(0, 256, memory.size, np.uint8)
    return runtime.knows(memory)


def test_bytes_come_back_and_only_the_gpu_asked_for_is_touched(runtime: FakeRuntime, device: CudaDevice) -> None:
    memory, back = host_memory(runtime, 3), host_memory(runtime, 4)
    device.copy_in(123, memory)
    device.copy_out(123, back[: memory.size])
    assert np.array_equal(back[: memory.size], memory)
    assert not np.array_equal(back[: memory.size], np.roll(memory, 1))
    assert (device.name, device.capacity_bytes, device.address, runtime.waits) == ("cuda:1", POOL, 0, 2)
    device.register_host(memory)
    device.close_client("nobody")
    device.close()
    assert runtime.touched == {1}
    assert runtime.freed == 1


@pytest.mark.parametrize("begin", [0, 1, 2 * PAGE_BYTES - 1, 2 * PAGE_BYTES])
@pytest.mark.parametrize("count", [1, PAGE_BYTES, 5 * PAGE_BYTES])
def test_copies_across_the_edges_of_registered_pieces_are_cut(
    runtime: FakeRuntime, device: CudaDevice, begin: int, count: int
) -> None:
    memory = host_memory(runtime, 8)
    wanted = memory[begin : begin + count].copy()
    assert device.register_host(memory[: 5 * PAGE_BYTES])  # and what is behind is not pinned
    assert len(runtime.registered) == 3
    device.copy_in(0, memory[begin : begin + count])
    memory[:] = 0
    device.copy_out(0, memory[begin : begin + count])
    assert np.array_equal(memory[begin : begin + count], wanted)


def test_case_21_memory_is_pinned_piece_by_piece_and_mapped_in_one_row(
    runtime: FakeRuntime, device: CudaDevice
) -> None:
    memory = host_memory(runtime, 5)
    steps = device.register_pieces(memory)
    assert next(steps) == 2 * PAGE_BYTES
    assert device.pinned_bytes == 2 * PAGE_BYTES
    with pytest.raises(ValueError, match="not mapped in one row on cuda:1"):
        device.device_pointer(memory)
    assert list(steps) == [4 * PAGE_BYTES, 5 * PAGE_BYTES]
    assert device.device_pointer(memory[100:]) == memory.ctypes.data + 100 + (1 << 44)
    device.unregister_host(memory)
    assert (device.pinned_bytes, runtime.registered) == (0, {})
    with pytest.raises(ValueError, match="does not begin on a page"):
        device.register_host(memory[1:])


def test_case_21_memory_that_may_not_be_locked_is_left_unpinned_with_advice(
    runtime: FakeRuntime, device: CudaDevice, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.pinnable_bytes = 3 * PAGE_BYTES
    memory = host_memory(runtime, 5)
    assert not device.register_host(memory)
    assert runtime.registered == {}
    assert "20.0 KiB of host memory cannot be pinned for cuda:1: cudaHostRegister: cudaErrorMemory" in caplog.text
    assert "set LimitMEMLOCK=infinity (systemd) or ulimit -l unlimited" in caplog.text
    device.copy_in(0, memory)


def test_a_clients_handles_are_opened_once_and_closed_when_it_dies(runtime: FakeRuntime, device: CudaDevice) -> None:
    first, second = (number.to_bytes(IPC_HANDLE_BYTES, "little") for number in (1 << 20, 1 << 21))
    assert device.open_handle("a", first) == device.open_handle("a", first) == 1 << 20
    device.open_handle("b", second)
    waited = runtime.waits
    assert device.close_client("a") == 1
    assert runtime.waits == waited + 3  # whatever still copied from there has ended
    assert runtime.opened == [1 << 21]
    assert device.close_client("a") == 0
    device.close()
    assert runtime.opened == []


def test_what_is_no_handle_is_refused_and_leaves_nothing_open(runtime: FakeRuntime, device: CudaDevice) -> None:
    with pytest.raises(ValueError, match="has 64 bytes; this one has 5"):
        device.open_handle("a", b"short")
    with pytest.raises(CudaError, match="cudaIpcOpenMemHandle"):
        device.open_handle("a", bytes(IPC_HANDLE_BYTES))
    assert device.close_client("a") == 0
    assert runtime.opened == []


def test_a_slot_is_exported_as_the_pools_handle_and_a_place(device: CudaDevice) -> None:
    slot = device.export_slot(PAGE_BYTES, 100)
    assert (int.from_bytes(slot.handle, "little"), slot.offset, slot.count) == (device.pointer, PAGE_BYTES, 100)


@pytest.mark.parametrize(("offset", "count"), [(POOL, 1), (-1, 1), (POOL - 5, 6)])
def test_nothing_beyond_the_pool_is_touched(device: CudaDevice, offset: int, count: int) -> None:
    memory = np.zeros(count, np.uint8)
    for attempt in (device.copy_in, device.copy_out):
        with pytest.raises(ValueError, match="are not within the pool's 1048576"):
            attempt(offset, memory)
    with pytest.raises(ValueError, match="are not within the pool"):
        device.export_slot(offset, count)


def test_a_gpu_that_is_not_there_is_named_and_none_is_touched(runtime: FakeRuntime) -> None:
    with pytest.raises(StartupError, match=r"'cuda:2', and of GPUs there are 2, cuda:0 to cuda:1") as caught:
        CudaDevice(2, POOL, runtime)
    assert caught.value.exit_code == ExitCode.NO_DEVICE
    assert runtime.touched == set()


def test_a_pool_that_the_gpu_cannot_hold_is_a_mistake_in_the_configuration(runtime: FakeRuntime) -> None:
    with pytest.raises(StartupError, match=r"gpu\.capacity: 2\.00 MiB cannot be had on cuda:0: CUDA out of") as caught:
        CudaDevice(0, 2 * POOL, runtime)
    assert caught.value.exit_code == ExitCode.CONFIG


def test_asking_for_a_gpu_where_there_is_none_ends_with_69() -> None:
    with pytest.raises(StartupError, match=r"gpu\.device is 'cuda:0'") as caught:
        open_device(Gpu(device="cuda:0"))
    assert caught.value.exit_code == ExitCode.NO_DEVICE


def test_importing_the_device_loads_neither_torch_nor_cuda() -> None:
    code = "import sys, kvtierd.gpu; print(sorted({'torch', 'cuda', 'numba.cuda'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_ranges_of_host_memory_are_found_where_the_device_sees_them_in_a_row(
    runtime: FakeRuntime, device: CudaDevice
) -> None:
    memory = host_memory(runtime, 8)
    device.register_host(memory[: 3 * PAGE_BYTES])  # two pieces in a row
    device.register_host(memory[5 * PAGE_BYTES : 6 * PAGE_BYTES])
    begin = memory.ctypes.data
    offsets = np.array([0, PAGE_BYTES, 2 * PAGE_BYTES, 5 * PAGE_BYTES, 5 * PAGE_BYTES + 1, 3 * PAGE_BYTES], np.uint64)
    sizes = np.array([3 * PAGE_BYTES, 2 * PAGE_BYTES, PAGE_BYTES + 1, PAGE_BYTES, PAGE_BYTES, 1], np.uint64)
    found = device.mapped(offsets + np.uint64(begin), sizes)
    wanted = [begin + SHIFT, begin + SHIFT + PAGE_BYTES, 0, begin + SHIFT + 5 * PAGE_BYTES, 0, 0]
    assert found.tolist() == wanted
    assert device.mapped(np.array([begin - 1], np.uint64), np.array([1], np.uint64)).tolist() == [0]
    device.unregister_host(memory)
    assert device.mapped(offsets + np.uint64(begin), sizes).tolist() == [0] * 6


def test_what_computes_reaches_the_pool_and_the_processor_does_not(device: CudaDevice) -> None:
    assert (device.address, device.compute_address) == (0, device.pointer)


def test_on_a_machine_of_processors_these_compute() -> None:
    device, on_host = HostDevice(PAGE_BYTES), HostAttention(1)
    assert device.attention(on_host) is on_host
    assert device.compute_address == device.address != 0
    device.close()


def test_what_computes_is_made_once_and_gives_its_memory_back(runtime: FakeRuntime, device: CudaDevice) -> None:
    runtime.memory_bytes = 1 << 26
    attention = device.attention(HostAttention(1))
    assert device.attention(HostAttention(1)) is attention
    memory = host_memory(runtime, 2)
    attention.adopt(memory)
    assert device.pinned_bytes == memory.size
    shape = Geometry(block_size=16, layers=1, kv_heads=1, k_dim=64, v_dim=64)
    partial = attention.begin(checked_query(np.ones((1, 1, 64), np.float32), shape, layer=0, length=16, available=16))
    blocks = Blocks.make([device.pointer], tokens=16, positions=0)
    with pytest.raises(CudaError, match="nothing computes here"):
        attention.compute(partial, blocks, 0, 1)
    device.close()
    assert (runtime.pools, runtime.registered) == ({}, {})
