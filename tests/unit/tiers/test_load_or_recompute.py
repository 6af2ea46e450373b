"""Advice in a lookup's reply: what is worth loading, from measured speeds and the client's own."""

from __future__ import annotations

import asyncio
import math

import pytest

from kvtierd.core.clock import ManualClock
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.namespace import Namespace
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import SHAPE, Rig, make_keys, small_settings
from kvtierd.tiers.speeds import Hop, Speeds

BLOCK = SHAPE.slot_bytes


def run(scenario):
    async def body():
        async with Rig(small_settings(), MemoryStore()) as rig:
            session = rig.session()
            await scenario(rig, session, await rig.register(session))
            rig.check_accounts()

    asyncio.run(body())


def set_speeds(rig, *, host, nvme, gpu=1e9):
    speeds = rig.manager._speeds
    speeds.host, speeds.nvme, speeds.gpu = (Hop(rig.clock, speed) for speed in (host, nvme, gpu))
    speeds._seen = -1


async def ask(rig, session, namespaces, keys, speed):
    request = m.Lookup(id=1, namespaces=namespaces, prefill_tokens_per_s=speed)
    return (await rig.call(session, request, *[keys.tobytes()] * len(namespaces))).reply


async def stored_in_host_then_nvme(rig, session, ns, keys, in_host):
    await rig.store(session, ns, keys)
    await rig.call(session, m.Flush(id=1))
    await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host", "gpu"]))
    if in_host:
        reply, _ = await rig.acquire(session, ns, keys[:in_host])
        await rig.release(session, reply)
    await asyncio.sleep(0.02)


def test_a_client_that_does_not_say_how_fast_it_is_gets_no_advice():
    async def scenario(rig, session, ns):
        await rig.store(session, ns, make_keys(3))
        reply = await ask(rig, session, [ns], make_keys(3), 0)
        assert (reply.hit, reply.load, reply.load_ns) == (3, None, 0)
        assert rig.manager.stats()["advised_lookups"] == 0

    run(scenario)


@pytest.mark.parametrize(("nvme_speed", "load"), [(1e12, 10), (1e3, 6)])
def test_a_slow_disk_is_left_alone_and_a_fast_one_is_read(nvme_speed, load):
    async def scenario(rig, session, ns):
        rig.manager._reads.prefetcher.window = 0
        keys = make_keys(10)
        await stored_in_host_then_nvme(rig, session, ns, keys, 6)
        set_speeds(rig, host=1e9, nvme=nvme_speed)
        reply = await ask(rig, session, [ns], keys, 16 * 1000.0)
        assert (reply.hit, reply.load) == (10, load)
        copy_ns = 10 * BLOCK if load == 10 else 6 * BLOCK
        assert reply.load_ns == pytest.approx(copy_ns, rel=0.01)
        assert rig.manager.stats()["advised_against_blocks"] == 10 - load

    run(scenario)


def test_a_fast_engine_computes_and_a_slow_one_loads():
    async def scenario(rig, session, ns):
        await rig.store(session, ns, make_keys(4))
        set_speeds(rig, host=1e6, nvme=1e6)
        per_block_s = BLOCK / 1e6
        tokens_per_s = SHAPE.block_size / per_block_s
        assert (await ask(rig, session, [ns], make_keys(4), 2 * tokens_per_s)).load == 0
        assert (await ask(rig, session, [ns], make_keys(4), tokens_per_s / 2)).load == 4

    run(scenario)


def test_ranks_of_one_prefix_pay_for_the_place_where_each_lies():
    async def scenario(rig, session, ns):
        rig.manager._reads.prefetcher.window = 0
        other = await rig.register(session, Namespace(model="rank 1", geometry=SHAPE))
        keys = make_keys(4)
        await stored_in_host_then_nvme(rig, session, ns, keys, 0)
        await rig.store(session, other, keys)
        await rig.call(session, m.Flush(id=1))
        set_speeds(rig, host=1e9, nvme=1e8)
        reply = await ask(rig, session, [ns, other], keys, 1.0)
        assert (reply.hit, reply.load) == (4, 4)
        assert reply.load_ns == pytest.approx(4 * BLOCK * (1 + 10 + 1), rel=0.01)

    run(scenario)


def test_nothing_stored_is_nothing_to_load():
    async def scenario(rig, session, ns):
        reply = await ask(rig, session, [ns], make_keys(2), 100.0)
        assert (reply.hit, reply.load, reply.load_ns) == (0, 0, 0)

    run(scenario)


@pytest.mark.parametrize("speed", [-1.0, math.inf, math.nan])
def test_a_speed_that_is_none_is_refused(speed):
    async def scenario(rig, session, ns):
        with pytest.raises(RequestError, match="prefill_tokens_per_s") as caught:
            await ask(rig, session, [ns], make_keys(2), speed)
        assert caught.value.code == ErrorCode.BAD_ARGUMENT

    run(scenario)


@pytest.mark.parametrize("speed", [1e-320, 1e308])
def test_any_positive_speed_is_answered(speed):
    async def scenario(rig, session, ns):
        await rig.store(session, ns, make_keys(2))
        assert (await ask(rig, session, [ns], make_keys(2), speed)).load in {0, 2}

    run(scenario)


def test_reads_that_overlap_are_measured_together():
    clock = ManualClock(10)
    hop = Hop(clock, 1.0)
    for _ in range(300):
        hop.begin()
        hop.begin()
        clock.advance(0.5)
        hop.end(1_000_000)
        clock.advance(0.5)
        hop.end(1_000_000)
        clock.advance(100)
    assert hop.bytes_per_s == pytest.approx(2e6, rel=0.01)


def test_a_read_that_failed_says_nothing_of_the_speed():
    clock = ManualClock(10)
    hop = Hop(clock, 5.0)
    hop.begin()
    clock.advance(9)
    hop.end(0)
    assert (hop.bytes_per_s, hop.moves) == (5.0, 0)


def test_the_best_copy_of_a_block_is_what_it_costs():
    speeds = Speeds(ManualClock(1))
    speeds.host, speeds.gpu, speeds.nvme = (Hop(ManualClock(1), speed) for speed in (1e9, 1e8, 1e7))
    masks = [m.TIER_HOST, m.TIER_GPU, m.TIER_NVME, m.TIER_HOST | m.TIER_NVME, m.TIER_GPU | m.TIER_NVME, 0]
    found = speeds.fetch_s(masks, 1000)
    assert found.tolist() == pytest.approx([1e-6, 11e-6, 101e-6, 1e-6, 11e-6, math.inf])


def test_what_the_tiers_move_is_measured():
    async def scenario(rig, session, ns):
        keys = make_keys(4)
        await rig.store(session, ns, keys)
        await rig.call(session, m.Flush(id=1))
        await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host", "gpu"]))
        before = {name: getattr(rig.manager._speeds, name).moves for name in ("nvme", "host")}
        await rig.call(session, m.Get(id=1, namespace=ns), keys.tobytes())
        after = {name: getattr(rig.manager._speeds, name).moves for name in ("nvme", "host")}
        assert all(after[name] > before[name] for name in before)
        assert rig.manager.stats()["host_to_client_bytes_per_s"] > 0

    run(scenario)
