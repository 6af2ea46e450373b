"""CASES row 25: every namespace has a shape of its own, and all of them go through the same tiers side by side."""

from __future__ import annotations

import asyncio

import pytest

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import Rig, make_keys, pattern

SHAPES = {
    "grouped-query": Geometry(block_size=16, layers=4, kv_heads=2, k_dim=64, v_dim=64, dtype="bf16"),
    "K wider than V": Geometry(block_size=32, layers=3, kv_heads=2, k_dim=96, v_dim=64, dtype="bf16"),
    "V wider than K": Geometry(block_size=16, layers=2, kv_heads=3, k_dim=32, v_dim=80, dtype="fp16"),
    "latent": Geometry(block_size=16, layers=5, kv_heads=1, k_dim=576, v_dim=0, dtype="bf16"),
    "one wide layer": Geometry(block_size=128, layers=1, kv_heads=8, k_dim=128, v_dim=128, dtype="fp8_e4m3"),
    "odd": Geometry(block_size=1, layers=7, kv_heads=1, k_dim=3, v_dim=5, dtype="fp32", layout="hnd"),
}
SPACES = {name: Namespace(model="hybrid", geometry=shape, group=i) for i, (name, shape) in enumerate(SHAPES.items())}
BLOCKS = 3


def run(scenario, store=None):
    async def body():
        async with Rig(store=store or MemoryStore()) as rig:
            rig.manager._reads.prefetcher.window = 0
            session = rig.session()
            numbers = {name: await rig.register(session, space) for name, space in SPACES.items()}
            await scenario(rig, session, numbers)
            rig.check_accounts()

    asyncio.run(body())


def keys_of(name, count=BLOCKS):
    return make_keys(count, namespace=SPACES[name])


async def store(rig, session, number, name):
    keys = keys_of(name)[await rig.lookup(session, number, keys_of(name)) :]
    if await rig.store(session, number, keys, SHAPES[name]) < len(keys):
        raise RequestError(ErrorCode.BUSY, "no room yet", retry_after_ms=10)
    await rig.call(session, m.Flush(id=1))


async def check(rig, session, number, name):
    """Lease and compare every byte of every block."""
    reply, descriptors = await rig.acquire(session, number, keys_of(name))
    if reply.count < BLOCKS:
        if reply.lease:
            await rig.release(session, reply)
        raise RequestError(ErrorCode.BUSY, f"{reply.count} blocks of {name}", retry_after_ms=10)
    for key, descriptor in zip(keys_of(name), descriptors, strict=True):
        assert (rig.read(descriptor, SHAPES[name]) == pattern(key, SHAPES[name])).all(), name
    await rig.release(session, reply)


async def room_for_all(rig):
    """A chunk that changes its class is made anew."""
    await asyncio.sleep(0.06)
    await rig.manager.memory_ready()


async def patiently(rig, work):
    """As a client does that is told to come back: there are fewer chunks than shapes."""
    for _ in range(20):
        try:
            return await work()
        except RequestError as error:
            if error.code != ErrorCode.BUSY or not error.retry_after_ms:
                raise
            await room_for_all(rig)
    raise AssertionError("busy for ever")


@pytest.mark.parametrize("name", SHAPES)
def test_case_25_each_shape_alone_comes_back_from_every_tier(name):
    async def scenario(rig, session, numbers):
        number, keys = numbers[name], keys_of(name)
        assert await rig.store(session, number, keys, SHAPES[name]) == BLOCKS
        await rig.call(session, m.Flush(id=1))
        await check(rig, session, number, name)
        answer = await rig.call(session, m.Prefetch(id=1, namespace=number, tier="gpu", wait=True), keys.tobytes())
        assert answer.reply.count == BLOCKS
        await rig.call(session, m.Purge(id=1, namespace=number, tiers=["host"]))
        await check(rig, session, number, name)
        await rig.call(session, m.Purge(id=1, namespace=number, tiers=["host", "gpu"]))
        await check(rig, session, number, name)
        got = await rig.call(session, m.Get(id=1, namespace=number), keys.tobytes())
        wanted = [pattern(key, SHAPES[name]) for key in keys]
        assert [bytes(frame) for frame in got.frames[1:]] == [block.tobytes() for block in wanted]

    run(scenario)


def test_case_25_all_shapes_share_one_host_tier_and_all_come_back_from_disk():
    async def scenario(rig, session, numbers):
        for name, number in numbers.items():
            await patiently(rig, lambda number=number, name=name: store(rig, session, number, name))
        for _ in range(2):
            for name, number in numbers.items():
                await patiently(rig, lambda number=number, name=name: check(rig, session, number, name))

    run(scenario)


def test_case_25_a_lookup_over_groups_of_different_shapes_answers_their_common_prefix():
    async def scenario(rig, session, numbers):
        first, second = "grouped-query", "odd"
        await rig.store(session, numbers[first], keys_of(first), SHAPES[first])
        await room_for_all(rig)
        await rig.store(session, numbers[second], keys_of(second)[:2], SHAPES[second])
        request = m.Lookup(id=1, namespaces=[numbers[first], numbers[second]], prefill_tokens_per_s=1e-3)
        reply = (await rig.call(session, request, keys_of(first).tobytes(), keys_of(second).tobytes())).reply
        assert (reply.hit, reply.load) == (2, 2)

    run(scenario)


def test_case_25_a_restart_finds_every_shape():
    disk = MemoryStore()

    async def stored(rig, session, numbers):
        for name, number in numbers.items():
            await patiently(rig, lambda number=number, name=name: store(rig, session, number, name))

    async def found(rig, session, numbers):
        for name, number in numbers.items():
            assert await rig.lookup(session, number, keys_of(name)) == BLOCKS, name

    run(stored, disk)
    run(found, MemoryStore(disk))


@pytest.mark.parametrize("name", SHAPES)
def test_case_25_heat_ghosts_and_budget_count_blocks_of_every_size(name):
    async def scenario(rig, session, numbers):
        number, slot_bytes = numbers[name], SHAPES[name].slot_bytes
        assert await rig.store(session, number, keys_of(name), SHAPES[name]) == BLOCKS
        await rig.call(session, m.Flush(id=1))
        await check(rig, session, number, name)
        stats = rig.manager.stats()
        assert stats["heat_max"] == 2
        assert stats["host_ghost_accesses"] == 2 * BLOCKS
        fits = BLOCKS * slot_bytes <= rig.settings.host.capacity
        assert stats["host_ghost_hits_1x"] == (BLOCKS if fits else 0)
        assert stats["offloaded_bytes"] == BLOCKS * slot_bytes

    run(scenario)
