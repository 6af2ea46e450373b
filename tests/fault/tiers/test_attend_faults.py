"""Attention when things go wrong: an answer is whole or an error that names what is wrong, and nothing stays behind."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.protocol import messages as m
from kvtierd.storage.interface import DiskError
from kvtierd.testing.attention import random_kv
from kvtierd.testing.memory_store import MemoryStore
from tests.unit.tiers.attending import BLOCKS, SHAPE, attending, check, queries, run
from tests.unit.tiers.test_sequences import refused

GOOD = {"layers": [0], "queries": 2, "heads": 6, "dtype": "fp32"}


async def ask(made, q, **fields):
    request = m.Attend(id=1, sequence=fields.pop("sequence", None) or await made.open(), **{**GOOD, **fields})
    return await made.rig.call(made.session, request, *([q] if isinstance(q, bytes) else q))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"layers": [3]}, "layer 3 is not in 0..2"),
        ({"layers": [-1]}, "layer -1"),
        ({"layers": []}, "no layer"),
        ({"lengths": [0]}, "length is 0"),
        ({"lengths": [-4]}, "length is -4"),
        ({"lengths": [113]}, "length is 113, and the blocks hold 112"),
        ({"lengths": [10, 11]}, "2 lengths for 1 layers"),
        ({"heads": 5}, "frame 1 has 1536 bytes"),
        ({"queries": 3}, "frame 1 has 1536 bytes"),
        ({"dtype": "bf16"}, "frame 1 has 1536 bytes"),
        ({"queries": 0}, "0 queries"),
        ({"heads": 0}, "0 heads"),
        ({"queries": 4, "heads": 3}, "3 heads, which is no multiple of the 2 KV heads"),
        ({"window": -1}, "window is -1"),
        ({"window": 1 << 62}, "window is 4611686018427387904"),
        ({"position": 1 << 62}, "position is 4611686018427387904"),
        ({"soft_cap": -2.0}, "soft_cap is -2.0"),
        ({"soft_cap": math.inf}, "soft_cap is inf"),
        ({"scale": math.nan}, "scale is nan"),
        ({"position": -7}, "position is -7"),
        ({"causal": False, "window": 4}, "window"),
        ({"v_dim": 16}, "v_dim is 16"),
        ({"lengths": [1]}, "length is 1"),
    ],
    ids=str,
)
def test_bad_input_is_refused_and_named(fields, text):
    async def scenario(made):
        error = await refused(ask(made, queries().astype(np.float32).tobytes(), **fields))
        assert error.code == ErrorCode.BAD_ARGUMENT
        assert text in str(error)

    run(scenario)


def test_nan_in_a_query_is_named_with_its_place():
    async def scenario(made):
        q = queries().astype(np.float32)
        q[1, 4, 7] = np.nan
        error = await refused(ask(made, q.tobytes()))
        assert error.code == ErrorCode.BAD_ARGUMENT
        assert "[1, 4, 7]" in str(error)
        sinks = np.array([0, 0, 0, np.nan, 0, 0], np.float32)
        error = await refused(ask(made, [queries().astype(np.float32).tobytes(), sinks.tobytes()], sinks=True))
        assert error.code == ErrorCode.BAD_ARGUMENT

    run(scenario)


def test_a_layer_that_is_named_twice_and_too_many_queries_are_refused():
    async def scenario(made):
        q = queries().astype(np.float32).tobytes()
        error = await refused(ask(made, [q, q], layers=[1, 1]))
        assert error.code == ErrorCode.BAD_ARGUMENT
        error = await refused(ask(made, q, queries=1 << 20))
        assert error.code == ErrorCode.TOO_LARGE

    run(scenario)


def test_a_layer_that_does_not_fit_the_ring_says_which_setting_to_raise():
    async def scenario(made):
        error = await refused(made.attend(await made.open(), queries()))
        assert error.code == ErrorCode.TOO_LARGE
        assert "attention.staging_bytes" in str(error)

    run(scenario, staging=SHAPE.layer_stride // 2)


@pytest.mark.parametrize("layer", [0, 2])
def test_case_04_a_damaged_block_in_the_middle_is_an_error_that_names_it(layer):
    store = MemoryStore()

    async def scenario(made):
        await made.place(["nvme"] * BLOCKS)
        sequence = await made.open()
        _, data, _ = store.blocks[made.kv.namespace.digest(), made.kv.names[4].tobytes()]
        data[layer * SHAPE.layer_stride + 77] ^= 8
        error = await refused(made.attend(sequence, queries(), layer))
        assert error.code == ErrorCode.CHECKSUM_MISMATCH
        assert f"block 4 ({made.kv.names[4].tobytes().hex()[:16]})" in str(error)
        assert await made.rig.lookup(made.session, made.number, made.kv.names) == 4, "a damaged block is still found"
        error = await refused(made.attend(sequence, queries(), 1))
        assert error.code == ErrorCode.NOT_PRESENT
        assert "block 4 " in str(error)

    run(scenario, store=store)


def test_case_04_a_disk_that_does_not_read_is_an_error_and_later_reads_go_on():
    class Refusing(MemoryStore):
        refuse = False

        async def read_layers(self, parts):
            if self.refuse:
                return {i: DiskError("cannot read: injected") for i in range(len(parts))}
            return await super().read_layers(parts)

    store = Refusing()

    async def scenario(made):
        await made.place(["nvme"] * BLOCKS)
        sequence = await made.open()
        store.refuse = True
        error = await refused(made.attend(sequence, queries()))
        assert error.code == ErrorCode.UNAVAILABLE
        assert "injected" in str(error)
        store.refuse = False
        await check(made, sequence, queries())

    run(scenario, store=store)


def test_a_block_that_moves_on_disk_between_planning_and_reading_is_read_where_it_went():
    class Moving(MemoryStore):
        moves = 0

        async def read_layers(self, parts):
            if not self.moves:
                self.moves = 1
                for key in parts.keys:
                    assert self.move(parts.namespace, key.tobytes())
            return await super().read_layers(parts)

    async def scenario(made):
        await made.place(["nvme"] * BLOCKS)
        await check(made, await made.open(), queries())

    run(scenario, store=Moving())


def test_a_block_whose_place_on_disk_was_recycled_is_named():
    store = MemoryStore()

    async def scenario(made):
        await made.place(["nvme"] * BLOCKS)
        sequence = await made.open()
        store.reclaim(made.kv.namespace.digest(), made.kv.names[5].tobytes())
        error = await refused(made.attend(sequence, queries()))
        assert error.code == ErrorCode.NOT_PRESENT
        assert "block 5 " in str(error)

    run(scenario, store=store)


def held(rig):
    """Let no block be computed until the returned event is set."""
    gate, compute = asyncio.Event(), rig.manager._attention._compute
    run_piece = compute.run

    async def waiting(piece, work=0):
        if getattr(getattr(piece, "func", None), "__name__", "") == "compute":
            await gate.wait()
        return await run_piece(piece, work)

    compute.run = waiting
    return gate


def test_case_05_no_slot_changes_hands_while_it_is_computed():
    async def scenario(made):
        await made.place(["host"] * BLOCKS)
        sequence = await made.open()
        rig = made.rig
        tasks, gate = [asyncio.create_task(check(made, sequence, queries(seed=i), i % 3)) for i in range(4)], held(rig)
        while rig.manager.copies.host.pool.holds.sum() < 4 * BLOCKS:
            await asyncio.sleep(0.001)
        stranger = await attending(rig, random_kv(SHAPE, 3, seed=8, model="stranger"))
        await rig.call(made.session, m.Delete(id=1, namespace=made.number), made.kv.names.tobytes())
        await rig.call(made.session, m.CloseSequence(id=1, sequences=[sequence]))
        for start in range(40):  # more than host has room for: everything that may go has to
            names = random_kv(SHAPE, 4, seed=100 + start, model="stranger").names
            await rig.store(stranger.session, stranger.number, names, SHAPE)
        gate.set()
        await asyncio.gather(*tasks)
        rig.manager.session_detached(stranger.session)

    run(scenario, attention={"kept_share": 0.0})


def test_eviction_during_an_attend_takes_nothing_that_is_in_use():
    async def scenario(made):
        await made.place(["host", "nvme", "host", "gpu", "host", "nvme", "host"])
        sequence, rig = await made.open(), made.rig
        stranger = await attending(rig, random_kv(SHAPE, 3, seed=8, model="stranger"))

        async def fill():
            for start in range(60):
                names = random_kv(SHAPE, 4, seed=200 + start, model="stranger").names
                await rig.store(stranger.session, stranger.number, names, SHAPE)
                await asyncio.sleep(0)

        filling = asyncio.create_task(fill())
        for turn in range(12):
            await check(made, sequence, queries(seed=turn), turn % 3)
        await filling
        await check(made, sequence, queries(), 1)
        assert rig.manager.copies.counters["host_evicted_blocks"] > 0
        rig.manager.session_detached(stranger.session)

    run(scenario)


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 40])
def test_an_attend_that_is_cancelled_leaves_nothing_behind(turns):
    async def scenario(made):
        await made.place(["nvme", "host", "gpu", "nvme", "nvme", "host", "nvme"])
        sequence = await made.open()
        task = asyncio.create_task(made.attend(sequence, queries(count=16), 0))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await check(made, sequence, queries(), 1)

    run(scenario, staging=2 * SHAPE.layer_stride)


def test_a_client_that_dies_during_an_attend_leaves_nothing_behind():
    async def scenario(made):
        await made.place(["nvme", "host", "gpu", "nvme", "nvme", "host", "nvme"])
        other = await attending(made.rig, random_kv(SHAPE, 5, seed=4, model="other"))
        sequence = await other.open()
        tasks = [asyncio.create_task(other.attend(sequence, queries(count=8), layer)) for layer in range(3)]
        await asyncio.sleep(0.001)
        for task in tasks:  # as the server does when a session ends
            task.cancel()
        made.rig.manager.session_detached(other.session)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert made.rig.manager.stats()["sequences"] == 0
        await check(made, await made.open(), queries())

    run(scenario)


def test_more_requests_than_the_limit_are_busy_at_once():
    async def scenario(made):
        sequence = await made.open()
        tasks = [asyncio.create_task(made.attend(sequence, queries(), 0)) for _ in range(5)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        busy = [error for error in results if isinstance(error, RequestError)]
        assert len(busy) == 3
        assert all(error.code == ErrorCode.BUSY and error.retry_after_ms > 0 for error in busy)
        await check(made, sequence, queries())

    run(scenario, attention={"max_requests": 8})
