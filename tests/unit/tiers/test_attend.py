"""Attention through the manager: what comes back is what the float64 oracle says, wherever the blocks lie."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest

from kvtierd.core.geometry import Geometry
from kvtierd.gpu.attend import merge
from kvtierd.gpu.reference.attention import relative_error
from kvtierd.protocol import messages as m
from kvtierd.testing.attention import random_kv
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import reply_of
from tests.unit.tiers.attending import BLOCKS, SHAPE, attending, check, queries, run

TIERS = ("gpu", "host", "nvme")


@pytest.mark.parametrize("tier", TIERS)
def test_every_layer_of_blocks_in_one_tier(tier):
    async def scenario(made):
        await made.place([tier] * BLOCKS)
        sequence = await made.open()
        for layer in range(SHAPE.layers):
            reply = await check(made, sequence, queries(), layer)
            found = [reply.gpu_parts, reply.host_parts, reply.nvme_parts]
            assert found == [BLOCKS * (tier == name) for name in TIERS]

    run(scenario)


def test_where_blocks_lie_never_changes_the_result_beyond_rounding():
    async def scenario(made):
        q, results = queries(), []
        for seed in range(4):
            await made.place(np.random.default_rng(seed).choice(TIERS, BLOCKS).tolist())
            sequence = await made.open()
            output, lse, _ = await made.attend(sequence, q, 1)
            results.append((output, lse))
        for (one, its), (other, theirs) in itertools.pairwise(results):
            assert relative_error(one, other.astype(np.float64)) <= 1e-5
            assert np.allclose(its, theirs, rtol=1e-6)

    run(scenario)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 111, 112])
def test_lengths_around_the_edges_of_blocks(length):
    async def scenario(made):
        await made.place(["nvme", "host", "gpu", "nvme", "nvme", "host", "nvme"])
        sequence = await made.open()
        await check(made, sequence, queries(count=min(2, length)), 2, length)

    run(scenario)


@pytest.mark.parametrize(
    "options",
    [{"window": 20}, {"window": 1}, {"soft_cap": 2.0}, {"causal": False}, {"position": 200}, {"scale": 0.3},
     {"position": 40, "window": 7}, {"position": 0}],
    ids=str,
)  # fmt: skip
def test_what_a_query_sees_and_how_it_is_weighed(options):
    async def scenario(made):
        await made.place(["nvme", "host", "gpu", "nvme", "nvme", "host", "nvme"])
        await check(made, await made.open(), queries(), 0, **options)

    run(scenario)


def test_blocks_that_no_query_sees_are_not_read():
    async def scenario(made):
        await made.place(["nvme"] * BLOCKS)
        sequence = await made.open()
        reply = await check(made, sequence, queries(count=1), 0, window=20)
        assert reply.nvme_parts == 2
        reply = await check(made, sequence, queries(count=1), 0, position=17)
        assert reply.nvme_parts == 2
        output, lse, reply = await made.attend(sequence, queries(count=1), 0, position=500, window=20)
        assert not output.any()
        assert np.isneginf(lse).all()
        assert reply.nvme_parts == 0

    run(scenario)


def test_sinks_take_part_once_however_many_parts_there_are():
    async def scenario(made):
        await made.place(["nvme", "host", "gpu"] * 2 + ["nvme"])
        sinks = np.linspace(-1, 3, queries().shape[1])
        await check(made, await made.open(), queries(), 0, sinks=sinks)

    run(scenario)


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(block_size=16, layers=2, kv_heads=2, k_dim=24, v_dim=80),
        Geometry(block_size=16, layers=2, kv_heads=1, k_dim=96, v_dim=0),
        Geometry(block_size=16, layers=2, kv_heads=3, k_dim=64, v_dim=16, dtype="fp16", layout="hnd"),
        Geometry(block_size=5, layers=2, kv_heads=2, k_dim=32, v_dim=32, dtype="fp32"),
    ],
    ids=["dims that differ", "latent", "hnd fp16", "odd fp32"],
)
def test_case_25_shapes_of_hybrid_latent_and_window_models(geometry):
    async def scenario(made):
        await made.place(["nvme", "host", "gpu", "nvme", "host"])
        sequence = await made.open()
        options = {} if geometry.v_dim else {"v_dim": 64}
        for layer, window in ((0, 0), (1, 12)):
            await check(made, sequence, queries(geometry), layer, window=window, **options)

    run(scenario, random_kv(geometry, 5))


def test_a_request_may_name_several_layers_each_with_its_length():
    async def scenario(made):
        await made.place(["nvme", "host", "gpu", "nvme", "nvme", "host", "nvme"])
        q = [queries(seed=seed).astype(np.float32) for seed in (1, 2)]
        request = m.Attend(
            id=1,
            sequence=await made.open(),
            layers=[2, 0],
            queries=2,
            heads=q[0].shape[1],
            dtype="fp32",
            lengths=[50, 90],
        )
        answer = await made.rig.call(made.session, request, *(part.tobytes() for part in q))
        assert len(answer.frames) == 5
        for place, (layer, length) in enumerate(((2, 50), (0, 90))):
            output = np.frombuffer(answer.frames[2 * place], np.float32).reshape(*q[0].shape[:2], -1)
            expected, _ = made.kv.reference(q[place], layer, length)
            assert relative_error(output, expected) <= 1e-5

    run(scenario)


@pytest.mark.parametrize(("dtype", "output"), [("bf16", ""), ("fp16", ""), ("fp32", "bf16"), ("bf16", "fp32")])
def test_queries_and_outputs_of_every_dtype(dtype, output):
    async def scenario(made):
        q = queries().astype(np.float32)
        sent = {"fp32": q, "fp16": q.astype(np.float16), "bf16": (q.view(np.uint32) >> 16).astype(np.uint16)}[dtype]
        meant = (sent.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else sent.astype(np.float32)
        request = m.Attend(
            id=1, sequence=await made.open(), layers=[0], queries=2, heads=q.shape[1], dtype=dtype, output=output
        )
        answer = await made.rig.call(made.session, request, sent.tobytes())
        kind = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}[output or dtype]
        found = np.frombuffer(answer.frames[0], kind).reshape(*q.shape[:2], -1)
        found = (found.astype(np.uint32) << 16).view(np.float32) if kind is np.uint16 else found.astype(np.float32)
        expected, lse = made.kv.reference(meant, 0, BLOCKS * 16)
        assert relative_error(found, expected) <= (1e-5 if kind is np.float32 else 1e-2)
        assert np.allclose(np.frombuffer(answer.frames[1], np.float32).reshape(lse.shape), lse, atol=1e-5)

    run(scenario)


def test_many_queries_are_cut_and_put_together_again(monkeypatch):
    monkeypatch.setattr("kvtierd.tiers.attend_request.BLOCK_WORK", 2048)

    async def scenario(made):
        await made.place(["nvme", "host", "gpu", "nvme", "nvme", "host", "nvme"])
        await check(made, await made.open(), queries(count=37), 1)
        await check(made, await made.open(), queries(count=37), 1, window=30, soft_cap=4.0)

    run(scenario)


def test_a_tail_outside_is_merged_to_what_one_pass_gives():
    async def scenario(made):
        await made.place(["nvme", "host", "gpu", "nvme", "nvme", "host", "nvme"])
        q = queries(count=1).astype(np.float32)
        length, size = 70, BLOCKS * 16
        sequence = await made.open()
        head, lse, _ = await made.attend(sequence, q, 0, lengths=[length], position=size - 1)
        from kvtierd.gpu.reference.attention import default_scale, reference_attention

        tail = [(made.kv.keys[0][i], made.kv.values[0][i], i * 16) for i in range(4, BLOCKS)]
        k, v, first = tail[0]
        tail[0] = (k[length - first :], v[length - first :], length)
        outside = reference_attention(q, tail, scale=default_scale(SHAPE.k_dim), v_dim=SHAPE.v_dim, position=size - 1)
        output, whole_lse = merge([(head, lse), tuple(part.astype(np.float32) for part in outside)])
        expected, expected_lse = made.kv.reference(q, 0, size)
        assert relative_error(output, expected) <= 1e-5
        assert np.allclose(whole_lse, expected_lse, rtol=1e-5)

    run(scenario)


def test_each_part_is_read_once_and_the_next_layer_is_on_its_way():
    store = MemoryStore()

    async def scenario(made):
        await made.place(["nvme"] * BLOCKS)
        sequence = await made.open()
        for layer in range(SHAPE.layers):
            reply = await check(made, sequence, queries(), layer)
            assert reply.nvme_parts == BLOCKS
            await asyncio.sleep(0.01)
            ahead = BLOCKS if layer + 1 < SHAPE.layers else 0
            assert store.layer_reads == BLOCKS * (layer + 1) + ahead
        assert made.rig.manager.copies.counters["attend_wasted_bytes"] == 0

    run(scenario, store=store)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_memory_is_bounded_by_the_ring_whatever_the_context(parts):
    async def scenario(made):
        ring = made.rig.manager._attention.ring
        await made.place(["nvme"] * BLOCKS)
        sequence = await made.open()
        await asyncio.gather(*(check(made, sequence, queries(seed=seed), seed % 3) for seed in range(6)))
        assert ring.size_bytes == parts * SHAPE.layer_stride
        assert ring.used_bytes <= ring.size_bytes

    run(scenario, staging=parts * SHAPE.layer_stride)


def test_parts_ahead_give_way_to_a_request():
    async def scenario(made):
        other = await attending(made.rig, random_kv(SHAPE, BLOCKS, seed=5, model="other"))
        for one in (made, other):
            await one.place(["nvme"] * BLOCKS)
        first, second = await made.open(), await other.open()
        await check(made, first, queries(), 0)
        await asyncio.sleep(0.01)
        ring = made.rig.manager._attention.ring
        assert ring.used_bytes, "nothing of the next layer is there"
        await check(other, second, queries(), 2)
        assert made.rig.manager.copies.counters["attend_wasted_bytes"] > 0
        await check(made, first, queries(), 1)
        made.rig.manager.session_detached(other.session)

    run(scenario, staging=BLOCKS * SHAPE.layer_stride)


def test_parts_ahead_that_are_still_on_their_way_give_way_when_they_arrive():
    class Slow(MemoryStore):
        gate = None

        async def read_layers(self, parts):
            if self.gate is not None:
                await self.gate.wait()
            return await super().read_layers(parts)

    store = Slow()

    async def scenario(made):
        other = await attending(made.rig, random_kv(SHAPE, BLOCKS, seed=5, model="other"))
        for one in (made, other):
            await one.place(["nvme"] * BLOCKS)
        first, second = await made.open(), await other.open()
        task = asyncio.create_task(check(made, first, queries(), 0))
        while store.layer_reads < BLOCKS:
            await asyncio.sleep(0)
        store.gate = asyncio.Event()
        await task
        waiting = asyncio.create_task(check(other, second, queries(), 2))
        await asyncio.sleep(0.05)
        store.gate.set()
        await asyncio.wait_for(waiting, 60)
        await check(made, first, queries(), 1)
        made.rig.manager.session_detached(other.session)

    run(scenario, staging=SHAPE.layer_stride, store=store)


def test_requests_at_once_take_turns():
    async def scenario(made):
        await made.place(["host"] * BLOCKS)
        sequence = await made.open()
        pieces = []
        attention = made.rig.manager._attention
        run_piece = attention._compute.run

        async def noted(piece, work=0):
            pieces.append(asyncio.current_task().get_name())
            return await run_piece(piece, work)

        attention._compute.run = noted
        tasks = [
            asyncio.create_task(made.attend(sequence, queries(count=count), 0), name=name)
            for name, count in (("long", 64), ("short", 1))
        ]
        await asyncio.gather(*tasks)
        attention._compute.run = run_piece
        last_short = len(pieces) - 1 - pieces[::-1].index("short")
        assert pieces[last_short:].count("long") > 10, "the short request waited for the long one"

    import kvtierd.tiers.attend_request as module

    before, module.BLOCK_WORK = module.BLOCK_WORK, 2048
    try:
        run(scenario)
    finally:
        module.BLOCK_WORK = before


def test_blocks_that_lie_in_other_extents_are_gathered_part_by_part():
    shape = Geometry(block_size=128, layers=2, kv_heads=1, k_dim=16, v_dim=24, layout="hnd")

    async def scenario(made):
        for parts in ([64, 64, 128, 128, 128], [256, 128, 128], [64, 64, 256, 128]):
            request = m.Reshape(id=1, namespace=made.number, parts=parts)
            answer = await made.rig.call(made.session, request, made.kv.names.tobytes())
            assert reply_of(answer, m.CountReply).count == 4
            await check(made, await made.open(), queries(shape), 1, 500)

    run(scenario, random_kv(shape, 4), capacity=8 << 20)


def test_a_gpu_that_what_computes_cannot_read_is_copied_from():
    store = MemoryStore()

    async def scenario(made):
        await made.place(["gpu"] * BLOCKS)
        made.rig.manager.copies.gpu.device.compute_address = 0
        await check(made, await made.open(), queries(), 2)
        assert store.layer_reads == 0, "it was read from disk instead"

    run(scenario, store=store)


def test_bytes_that_hops_count_by_themselves_are_among_the_statistics():
    async def scenario(made):
        await made.place(["gpu"] * BLOCKS)
        stats = made.rig.manager.stats()
        assert stats["host_to_gpu_moved_bytes"] == BLOCKS * SHAPE.slot_bytes

    run(scenario)
