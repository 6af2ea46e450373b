"""Attend of a manager whose gpu tier is a GPU: sequences in all tiers, and what happens to their blocks meanwhile.

In the simulator over a stand-in for CUDA (tests/gpu/simulated_cuda.py), or on a device.
"""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.gpu.attend import Blocks, checked_query
from kvtierd.gpu.attend_host import HostAttention
from kvtierd.gpu.kernels.attention import choose, kernels_for
from kvtierd.gpu.kernels.registry import cuda_is_simulated
from kvtierd.gpu.reference.attention import relative_error
from kvtierd.protocol import messages as m
from kvtierd.testing import rig as rigs
from kvtierd.testing.attention import AttendRig, random_kv
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import Rig, small_settings
from tests.gpu.simulated_cuda import make_device
from tests.unit.tiers.lossy_blocks import LossyRig
from tests.unit.tiers.lossy_blocks import settings as lossy_settings

SIMULATED = pytest.mark.skipif("not cuda_is_simulated()", reason="looks into the stand-in")
TIERS = Geometry(block_size=8, layers=2, kv_heads=1, k_dim=64, v_dim=64)


def serve(monkeypatch, scenario, blocks=5, rig=None):
    """A manager whose gpu tier is the device, and random KV stored through it; or what `rig()` makes, with nothing."""
    made = []

    def open_device(settings):
        made.append(make_device(settings.capacity))
        return made[-1]

    monkeypatch.setattr(rigs, "open_device", open_device)

    async def body():
        if rig is not None:
            async with rig() as one:
                await scenario(one)
            return
        async with Rig(small_settings(), MemoryStore()) as one:
            await scenario(await AttendRig.make(one, random_kv(TIERS, blocks)))

    asyncio.run(body())
    if cuda_is_simulated():
        assert made[0].runtime.pools == {}, "device memory was not given back"
        assert made[0].runtime.registered == {}, "host memory is pinned for ever"
    return made[0]


def test_a_sequence_in_all_three_tiers_is_attended_to_on_the_gpu(monkeypatch):
    async def scenario(made):
        await made.rig.manager._room.pinning.settled()
        await made.place(["gpu", "nvme", "host", "nvme", "gpu"])
        sequence, q = await made.open(), np.random.default_rng(5).standard_normal((1, 1, 64))
        for layer in range(TIERS.layers):
            output, lse, reply = await made.attend(sequence, q, layer)
            expected, expected_lse = made.kv.reference(q.astype(np.float32), layer, 5 * TIERS.block_size)
            assert relative_error(output, expected) <= 2e-5
            assert np.allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
            assert (reply.gpu_parts, reply.host_parts, reply.nvme_parts) == (2, 1, 2)

    device = serve(monkeypatch, scenario)
    if cuda_is_simulated():
        assert {name for name in device.runtime.launched if "merge" not in name} == {choose("bf16", 64, 64, 1).name}
        assert set(device.runtime.launched) <= set(device.runtime.prepared)
        assert sorted(device.runtime.prepared) == sorted(k.name for k in kernels_for(TIERS, lossy=False)), "each once"
        assert device.runtime.compiled == device.runtime.prepared, "apart from this process, before each is loaded"
        assert device.runtime.compiling_ended
        # Blocks came into the pool, and what goes with a call did; nothing that is mapped was copied.
        assert device.runtime.copied["pageable"] == 0


def test_a_client_that_dies_in_the_midst_of_a_kernel_leaves_nothing_held(monkeypatch):
    async def scenario(made):
        await made.place(["gpu", "nvme", "host", "nvme", "gpu"])
        sequence, q = await made.open(), np.random.default_rng(5).standard_normal((1, 1, 64))
        task = asyncio.create_task(made.attend(sequence, q))
        runtime = made.rig.manager.copies.gpu.device.runtime
        while cuda_is_simulated() and not runtime.launched:
            await asyncio.sleep(0.005)
        task.cancel()
        made.rig.manager.session_detached(made.session)
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.05)
        copies = made.rig.manager.copies
        assert not copies.host.pool.holds.any()
        assert not copies.gpu.pool.holds.any()
        assert made.rig.manager._attention.ring.used_bytes == 0
        made.rig.check_accounts()

    serve(monkeypatch, scenario)


@SIMULATED
def test_an_error_of_cuda_is_an_answer_that_says_so_and_leaves_nothing_held(monkeypatch):
    async def scenario(made):
        await made.place(["gpu", "nvme", "host", "nvme", "gpu"])
        sequence, q = await made.open(), np.random.default_rng(5).standard_normal((1, 1, 64))
        manager, runtime = made.rig.manager, made.rig.manager.copies.gpu.device.runtime
        runtime.failing = "attention_simt"
        with pytest.raises(RequestError, match="attention cannot be computed: attention_simt") as caught:
            await made.attend(sequence, q)
        assert caught.value.code == ErrorCode.UNAVAILABLE
        assert manager.copies.counters["attend_failed"] == 1
        runtime.failing = ""
        await made.attend(sequence, q)
        manager.session_detached(made.session)
        await asyncio.sleep(0.02)
        assert not manager.copies.host.pool.holds.any()
        assert not manager.copies.gpu.pool.holds.any()
        assert manager._attention.ring.used_bytes == 0

    serve(monkeypatch, scenario)


class Held:
    """An attend whose first kernel does not begin before `end`, or the end of the block."""

    def __init__(self, runtime, attend):
        self._begun, self._go, self._launch, self._attend = threading.Event(), threading.Event(), runtime.launch, attend
        runtime.launch = self._held

    def _held(self, *given):
        self._begun.set()
        assert self._go.wait(100)
        self._launch(*given)

    async def __aenter__(self):
        self._task = asyncio.create_task(self._attend)
        while not self._begun.is_set():
            assert not self._task.done(), self._task.exception()
            await asyncio.sleep(0.005)
        return self

    async def __aexit__(self, *_error):
        self._go.set()
        await asyncio.wait([self._task])

    async def end(self):
        self._go.set()
        return await self._task


@SIMULATED
def test_blocks_that_are_evicted_while_a_kernel_is_to_read_them_stay_until_it_has_ended(monkeypatch):
    async def scenario(made):
        copies = made.rig.manager.copies
        await made.place(["gpu", "host", "nvme"])
        sequence, q = await made.open(), np.random.default_rng(5).standard_normal((1, 1, 64))
        async with Held(copies.gpu.device.runtime, made.attend(sequence, q)) as held:
            await made.rig.call(made.session, m.Purge(id=1, namespace=made.number, tiers=["gpu", "host"]))
            before = copies.counters["host_evicted_blocks"]
            for seed in range(1, 20):  # more than the tier has room for
                await AttendRig.make(made.rig, random_kv(TIERS, 16, seed=16 * seed, model="other"), made.session)
                await made.rig.call(made.session, m.Flush(id=1))
            assert copies.counters["host_evicted_blocks"] > before
            output, lse, reply = await held.end()
        expected, expected_lse = made.kv.reference(q.astype(np.float32), 0, 3 * TIERS.block_size)
        assert relative_error(output, expected) <= 2e-5
        assert np.allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
        assert (reply.gpu_parts, reply.host_parts, reply.nvme_parts) == (1, 1, 1)
        await made.rig.call(made.session, m.CloseSequence(id=1, sequences=[sequence]))
        assert not copies.host.pool.holds.any()
        assert not copies.gpu.pool.holds.any()
        made.rig.check_accounts()

    serve(monkeypatch, scenario, blocks=3)


LOSSY = Geometry(block_size=16, layers=1, kv_heads=3, k_dim=64, v_dim=64)
"""12 KiB a block, 8 KiB in FP8."""


@SIMULATED
def test_compression_passes_over_blocks_that_a_kernel_is_to_read_until_it_has_ended(monkeypatch):
    async def scenario(rig):
        session, number = await rig.client()
        every, q = rig.keys(4), np.random.default_rng(5).standard_normal((1, 3, 64)).astype(np.float32)
        await rig.store(session, number, every, LOSSY)
        keys = every[:2]
        opened = await rig.call(session, m.OpenSequence(id=1, namespace=number), keys.tobytes())
        ask = m.Attend(id=1, sequence=opened.reply.sequence, layers=[0], queries=1, heads=3, dtype="fp32")
        copies = rig.manager.copies
        async with Held(copies.gpu.device.runtime, rig.call(session, ask, q.tobytes())) as held:
            await rig.compressed(2)
            assert copies.shapes.forms.mask(rig.rows(every)).tolist() == [False, False, True, True]
            answer = await held.end()
        device = HostAttention(1)
        query = checked_query(q, LOSSY, layer=0, length=32, available=32)
        memory = [np.ascontiguousarray(rig.exact(key)) for key in keys]
        parts = Blocks.make([part.ctypes.data for part in memory], tokens=16, positions=[0, 16])
        device.compute(partial := device.begin(query), parts)
        expected, expected_lse = partial.result()
        found = [
            np.frombuffer(frame, np.float32).reshape(shape)
            for frame, shape in zip(answer.frames, (expected.shape, expected_lse.shape), strict=False)
        ]
        assert relative_error(found[0], expected) <= 2e-5
        assert np.allclose(found[1], expected_lse, rtol=1e-5, atol=1e-5)
        assert not answer.frames[2], "what was computed is not lossy"
        await rig.call(session, m.CloseSequence(id=1, sequences=[opened.reply.sequence]))
        assert not copies.host.pool.holds.any()
        await rig.compressed(4, seconds=3600)
        assert copies.shapes.forms.mask(rig.rows(every)).all()
        rig.check_accounts()

    serve(monkeypatch, scenario, rig=lambda: LossyRig(lossy_settings(gpu=True), MemoryStore(), LOSSY))
