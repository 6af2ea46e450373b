"""What becomes of prefetches: used, late, wasted, cancelled, refused; and what they never displace."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from kvtierd.core.errors import StorageError
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import SHAPE, Rig, make_keys, small_settings
from kvtierd.tiers import prefetch

PER_CHUNK = (1 << 20) // SHAPE.slot_bytes


class SlowStore(MemoryStore):
    """Reads wait while `hold` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.hold = asyncio.Event()
        self.hold.set()
        self.reads = 0
        self.unreadable: set[bytes] = set()

    async def read(self, items):
        self.reads += len(items)
        await self.hold.wait()
        errors = await super().read(items)
        refused = StorageError("the disk refused")
        return [refused if item.key in self.unreadable else error for item, error in zip(items, errors, strict=True)]


def run(scenario, *, window=3, **host):
    settings = small_settings(**host)
    cache = msgspec.structs.replace(settings.kv_cache_config, prefetch_window=window)
    store = SlowStore()

    async def body():
        async with Rig(msgspec.structs.replace(settings, kv_cache_config=cache), store) as rig:
            session = rig.session()
            await scenario(rig, store, session, await rig.register(session))
            await asyncio.sleep(0.02)
            rig.check_accounts()

    asyncio.run(body())


async def make_cold(rig, session, ns, keys):
    await rig.store(session, ns, keys)
    await rig.call(session, m.Flush(id=1))
    await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host", "gpu"]))


async def read(rig, session, ns, keys, **options):
    reply, _ = await rig.acquire(session, ns, keys, **options)
    if reply.lease:
        await rig.release(session, reply)
    return reply.count


def outcomes(rig):
    stats = rig.manager.stats()
    names = ("prefetched", "prefetch_used", "prefetch_late", "prefetch_wasted", "prefetch_cancelled")
    return [stats[f"{name}_blocks"] for name in names]


def test_what_is_read_after_it_came_was_used():
    async def scenario(rig, _store, session, ns):
        keys = make_keys(6)
        await make_cold(rig, session, ns, keys)
        await read(rig, session, ns, keys[:2])
        await asyncio.sleep(0.02)
        assert outcomes(rig) == [3, 0, 0, 0, 0]
        await read(rig, session, ns, keys[:5])
        assert outcomes(rig)[:3] == [3, 3, 0]
        await read(rig, session, ns, keys[:5])
        assert outcomes(rig)[1] == 3, "a block is used ahead of time once"

    run(scenario)


def test_what_is_asked_for_on_its_way_was_late():
    async def scenario(rig, store, session, ns):
        keys = make_keys(5)
        await make_cold(rig, session, ns, keys)
        await read(rig, session, ns, keys[:1])
        await asyncio.sleep(0.02)
        await read(rig, session, ns, keys[:4])
        store.hold.clear()
        await make_cold(rig, session, ns, make_keys(3, start=2))
        first = asyncio.create_task(rig.acquire(session, ns, make_keys(1, start=2)))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(rig.acquire(session, ns, make_keys(3, start=2)))
        await asyncio.sleep(0.01)
        store.hold.set()
        for reply, _ in (await first, await second):
            await rig.release(session, reply)
        assert outcomes(rig) == [3 + 1 + 2, 3, 2, 0, 0]

    run(scenario)


def test_what_leaves_host_unread_was_wasted():
    async def scenario(rig, _store, session, ns):
        keys = make_keys(6)
        await make_cold(rig, session, ns, keys)
        await read(rig, session, ns, keys[:2])
        await asyncio.sleep(0.02)
        await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host"]))
        assert outcomes(rig) == [3, 0, 0, 3, 0]
        await read(rig, session, ns, keys)
        assert outcomes(rig)[1:4] == [0, 0, 3]

    run(scenario)


def test_a_request_that_is_cancelled_takes_its_window_along():
    async def scenario(rig, store, session, ns):
        keys = make_keys(8)
        await make_cold(rig, session, ns, keys)
        store.hold.clear()
        reading = asyncio.create_task(rig.acquire(session, ns, keys[:2]))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        store.hold.set()
        await asyncio.sleep(0.02)
        assert outcomes(rig)[-1] + outcomes(rig)[0] == 3
        assert not rig.manager.copies.host.pool.holds.any()

    run(scenario)


@pytest.mark.parametrize("goes", ["session", "deadline"])
def test_what_had_not_begun_ends_with_the_session_or_the_request(goes, monkeypatch):
    monkeypatch.setattr(prefetch, "PIECE_BLOCKS_MAX", 32 // prefetch.PIECES)

    async def scenario(rig, store, session, ns):
        keys = make_keys(2 * PER_CHUNK - 10)
        await make_cold(rig, session, ns, keys)
        client = rig.session()
        theirs = await rig.register(client)
        store.hold.clear()
        store.reads = 0
        request = m.Prefetch(id=1, namespace=theirs, wait=goes == "deadline")
        task = asyncio.create_task(rig.call(client, request, keys.tobytes()))
        await asyncio.sleep(0.02)
        assert store.reads == 32, "a prefetch goes in pieces"
        if goes == "session":
            rig.manager.process_gone(client)
        else:
            task.cancel()
        store.hold.set()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.02)
        assert store.reads == 32
        assert outcomes(rig) == [32, 0, 0, 0, len(keys) - 32]
        assert not rig.manager.copies.host.pool.holds.any()

    run(scenario, window=0)


def test_the_next_piece_is_asked_for_while_one_is_on_its_way(monkeypatch):
    monkeypatch.setattr(prefetch, "PIECE_BLOCKS_MAX", 4)

    async def scenario(rig, store, session, ns):
        keys = make_keys(4 * (prefetch.PIECES + 1))
        await make_cold(rig, session, ns, keys)
        store.hold.clear()
        store.reads = 0
        request = m.Prefetch(id=1, namespace=ns, wait=True)
        task = asyncio.create_task(rig.call(session, request, keys.tobytes()))
        await asyncio.sleep(0.02)
        reads = store.reads
        store.hold.set()
        answer = await task
        assert (reads, answer.reply.count, store.reads) == (4 * prefetch.PIECES, len(keys), len(keys))

    run(scenario, window=0)


def test_a_piece_that_cannot_be_read_ends_a_prefetch_and_those_behind_it(monkeypatch):
    monkeypatch.setattr(prefetch, "PIECE_BLOCKS_MAX", 4)

    async def scenario(rig, store, session, ns):
        keys = make_keys(12)
        await make_cold(rig, session, ns, keys)
        store.unreadable.add(keys[5].tobytes())
        answer = await rig.call(session, m.Prefetch(id=1, namespace=ns, wait=True), keys.tobytes())
        assert answer.reply.count == 5
        await asyncio.sleep(0.02)
        assert not rig.manager.copies.host.pool.holds.any()

    run(scenario, window=0)


async def fill_host(rig, session, ns, *, uses):
    """Use every slot of host by blocks of one prompt that was read so often."""
    keys = make_keys(2 * PER_CHUNK, start=7)
    assert await rig.store(session, ns, keys) == len(keys)
    await rig.call(session, m.Flush(id=1))
    for _ in range(uses):
        assert await read(rig, session, ns, keys) == len(keys)
    return keys


def test_a_hotter_block_is_never_displaced_and_a_colder_one_is():
    async def scenario(rig, _store, session, ns):
        keys = make_keys(6)
        await make_cold(rig, session, ns, keys)
        others = await fill_host(rig, session, ns, uses=2)
        answer = await rig.call(session, m.Prefetch(id=1, namespace=ns, wait=True), keys.tobytes())
        assert answer.reply.count == 0
        assert rig.manager.stats()["prefetch_refused_blocks"] == 6
        assert rig.manager.copies.tier_counts()["host_blocks"] == len(others)
        for _ in range(4):
            await read(rig, session, ns, keys)
        await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host", "gpu"]))
        assert await read(rig, session, ns, others) == len(others)
        answer = await rig.call(session, m.Prefetch(id=1, namespace=ns, wait=True), keys.tobytes())
        assert answer.reply.count == 6

    run(scenario, window=0, watermark=1.0)


def test_a_leased_block_is_never_displaced():
    async def scenario(rig, _store, session, ns):
        keys = make_keys(6)
        await make_cold(rig, session, ns, keys)
        for _ in range(9):
            await read(rig, session, ns, keys)
        await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host", "gpu"]))
        others = await fill_host(rig, session, ns, uses=0)
        lease, descriptors = await rig.acquire(session, ns, others)
        generations = descriptors["generation"].copy()
        answer = await rig.call(session, m.Prefetch(id=1, namespace=ns, wait=True), keys.tobytes())
        assert answer.reply.count == 0
        assert [rig.generation(descriptor) for descriptor in descriptors] == generations.tolist()
        await rig.release(session, lease)

    run(scenario, window=0, watermark=1.0)


def test_a_prefetch_makes_nothing_hotter_or_more_recent():
    async def scenario(rig, _store, session, ns):
        keys = make_keys(4)
        await rig.store(session, ns, keys)
        rows = rig.manager.copies.blocks.find_prefix(keys, 0)
        before = rig.manager._demand.heat(rows).tolist()
        await rig.call(session, m.Prefetch(id=1, namespace=ns, wait=True), keys.tobytes())
        assert rig.manager._demand.heat(rows).tolist() == before

    run(scenario)


def test_the_window_goes_on_over_the_pieces_of_a_prefix():
    async def scenario(rig, _store, session, ns):
        keys = make_keys(8)
        await rig.store(session, ns, keys[:4])
        parent = keys[3].tobytes()
        reserved = await rig.call(session, m.Reserve(id=1, namespace=ns, parent=parent), keys[4:].tobytes())
        await rig.call(session, m.Abort(id=1, reservation=reserved.reply.reservation))
        await rig.store(session, ns, keys[4:])
        await rig.call(session, m.Flush(id=1))
        await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host", "gpu"]))
        await read(rig, session, ns, keys[4:5], parent=parent)
        await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host", "gpu"]))
        await read(rig, session, ns, keys[3:4])
        await asyncio.sleep(0.02)
        assert (
            rig.manager.copies.blocks.residency(rig.manager.copies.blocks.find(keys[4:7], 0)).tolist()
            == [m.TIER_HOST | m.TIER_NVME] * 3
        )

    run(scenario)
