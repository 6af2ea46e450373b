"""Chunks of host are pinned for a GPU after the start, unpinned before they go; the dead leave nothing mapped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvtierd.gpu import cuda_device
from kvtierd.gpu.cuda_device import IPC_HANDLE_BYTES, CudaDevice
from kvtierd.testing import rig as rigs
from kvtierd.testing.rig import Rig, small_settings
from kvtierd.tiers.pinning import Pinning
from tests.unit.gpu.fake_cuda import FakeRuntime

MIB = 1 << 20


def run(
    monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime, scenario: Callable[[Rig, Pinning], Awaitable[None]]
) -> None:
    """Run over a device that makes its calls of CUDA to a stand-in."""
    monkeypatch.setattr(cuda_device, "PIECE_BYTES", MIB // 4)
    monkeypatch.setattr(rigs, "open_device", lambda settings: CudaDevice(0, settings.capacity, runtime))

    async def body() -> None:
        async with Rig(small_settings()) as rig:
            await scenario(rig, rig.manager._room.pinning)

    asyncio.run(body())


def test_all_chunks_are_pinned_in_pieces_and_unpinned_before_they_are_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    unmapped_while_pinned: list[int] = []

    async def scenario(rig: Rig, pinning: Pinning) -> None:
        host = rig.manager.copies.host
        await pinning.settled()
        assert sorted(runtime.registered.values()) == [MIB // 4] * 8
        close = host.close
        monkeypatch.setattr(host, "close", lambda: (unmapped_while_pinned.append(len(runtime.registered)), close())[1])

    run(monkeypatch, runtime, scenario)
    assert unmapped_while_pinned == [0]
    assert runtime.registered == {}
    assert runtime.touched == {0}


def test_a_chunk_that_goes_is_unpinned_and_what_comes_for_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()

    async def scenario(rig: Rig, pinning: Pinning) -> None:
        await pinning.settled()
        first = rig.manager.copies.host.chunks()[0]
        begin = first.memory.ctypes.data
        assert begin in runtime.registered
        pinning.gone(first)
        memory = first.memory  # stays mapped here, so that no other chunk takes its place
        await pinning.settled()
        assert len(runtime.registered) == 4
        assert begin not in runtime.registered
        pinning.came(first)
        pinning.came(first)
        await pinning.settled()
        assert memory.ctypes.data in runtime.registered
        assert len(runtime.registered) == 8

    run(monkeypatch, runtime, scenario)
    assert runtime.registered == {}


def test_where_pinning_is_refused_nothing_stays_pinned_and_the_log_says_what_to_do_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = FakeRuntime(pinnable_bytes=MIB // 2)

    async def scenario(_rig: Rig, pinning: Pinning) -> None:
        await pinning.settled()
        assert runtime.registered == {}

    run(monkeypatch, runtime, scenario)
    assert caplog.text.count("set LimitMEMLOCK=infinity (systemd)") == 1


def test_memory_that_a_client_exported_is_unmapped_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()

    async def scenario(rig: Rig, pinning: Pinning) -> None:
        gpu = rig.manager.copies.gpu
        assert gpu is not None
        session, other = rig.session(), rig.session()
        assert isinstance(gpu.device, CudaDevice)
        for number, one in enumerate((session, other), 1):
            gpu.device.open_handle(str(one.id), (number << 20).to_bytes(IPC_HANDLE_BYTES, "little"))
        rig.manager.process_gone(session)
        await pinning.settled()
        assert runtime.opened == [2 << 20]
        assert not gpu.device.has_client(str(session.id))

    run(monkeypatch, runtime, scenario)
    assert runtime.opened == []
