"""What the tiers tell their eviction policies, and which policy that is."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from kvtierd.config.schema import KvCache
from kvtierd.policy.eviction import LruEviction
from kvtierd.policy.return_eviction import ReturnEviction
from kvtierd.policy.returns import ReturnModel
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import Rig, make_keys, small_settings
from kvtierd.tiers.requests import REQUEST_NS_MAX, REQUESTS_KEPT, Requests

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("cache", "kind"), [(KvCache(), ReturnEviction), (KvCache(eviction="lru"), LruEviction)], ids=["default", "lru"]
)
def test_the_setting_chooses_the_policy_of_host_and_gpu(cache, kind):
    async def life():
        async with Rig(msgspec.structs.replace(small_settings(), kv_cache_config=cache)) as rig:
            assert isinstance(rig.manager.copies.host.policy, kind)
            assert isinstance(rig.manager.copies.gpu.policy, kind)

    asyncio.run(life())


class Observed:
    """A model that notes what it is told, step by step; the quick ways do the same (test_quick_ways.py)."""

    def __init__(self, rig):
        rig.manager.quick.turn_off()
        self.model = rig.manager._reads._uses._model
        self.told = []
        self._observe = self.model.observe
        self.model.observe = self

    def __call__(self, keys, hits, now_ns, *, again=None):
        self.told.append((len(keys), hits, again is not None))
        return self._observe(keys, hits, now_ns, again=again)


def test_a_store_of_what_was_just_read_and_more_is_told_as_the_same_request():
    async def life():
        async with Rig() as rig:
            session = rig.session()
            ns = await rig.register(session)
            observed = Observed(rig)
            await rig.store(session, ns, make_keys(5))
            rig.clock.advance(120)
            reply, _ = await rig.acquire(session, ns, make_keys(6))
            await rig.release(session, reply)
            await rig.store(session, ns, make_keys(6))  # all of it was asked for already
            await rig.store(session, ns, make_keys(8))
            rig.clock.advance(120)
            await rig.store(session, ns, make_keys(9))  # too late: the read of this turn was not seen
            assert observed.told == [(5, 0, False), (6, 5, False), (8, 0, True), (9, 8, False)]

    asyncio.run(life())


def test_another_client_s_store_is_another_request():
    async def life():
        async with Rig() as rig:
            first, second = rig.session(), rig.session()
            observed = Observed(rig)
            for session in (first, second):
                ns = await rig.register(session)
                await rig.store(session, ns, make_keys(4))
            assert observed.told == [(4, 0, False), (4, 4, False)]

    asyncio.run(life())


def test_blocks_with_a_copy_on_disk_are_worth_less_in_host_until_it_is_gone():
    async def life():
        async with Rig(store=MemoryStore()) as rig:
            session = rig.session()
            ns = await rig.register(session)
            await rig.store(session, ns, make_keys(4))
            await rig.call(session, m.Flush(id=1))
            copies = rig.manager.copies
            rows = copies.blocks.find(make_keys(4), 0)
            slots = copies.host.policy._slots
            assert (slots["copied"][copies.blocks.table.host_slot[rows]] > 0).all()
            copies.drop_nvme(rows[:2])
            assert (slots["copied"][copies.blocks.table.host_slot[rows]] > 0).tolist() == [False, False, True, True]

    asyncio.run(life())


def test_blocks_that_were_recovered_have_a_copy_on_disk_when_they_come_into_host():
    async def life():
        first = MemoryStore()
        async with Rig(store=first) as rig:
            session = rig.session()
            await rig.store(session, await rig.register(session), make_keys(4))
            await rig.call(session, m.Flush(id=1))
        async with Rig(store=MemoryStore(first)) as rig:
            session = rig.session()
            reply, _ = await rig.acquire(session, await rig.register(session), make_keys(4))
            assert reply.count == 4
            copies = rig.manager.copies
            slots = copies.blocks.table.host_slot[copies.blocks.find(make_keys(4), 0)]
            assert (copies.host.policy._slots["copied"][slots] > 0).all()

    asyncio.run(life())


def test_slots_of_a_reservation_that_is_given_back_are_no_victims():
    async def life():
        async with Rig() as rig:
            session = rig.session()
            ns = await rig.register(session)
            await rig.store(session, ns, make_keys(3))
            grant = await rig.reserve(session, ns, make_keys(6))
            copies = rig.manager.copies
            cls = copies.host.pool.classes[0]
            # Nothing goes while blocks that come after it are being written.
            assert copies.host.victims(cls, 9).size == 0
            await rig.call(session, m.Abort(id=1, reservation=grant.id))
            rows = copies.blocks.find(make_keys(3), 0)
            assert copies.host.victims(cls, 9).tolist() == copies.blocks.table.host_slot[rows][::-1].tolist()
            rig.check_accounts()

    asyncio.run(life())


def test_the_requests_of_a_session_are_found_by_what_they_begin_with():
    model, requests = ReturnModel(10, seed=1, records=64), Requests()
    words = np.arange(1, 2000, dtype=np.uint64) << np.uint64(40)
    keys = np.zeros((words.size, 4), np.uint64)
    keys[:, 0] = words
    keys = keys.view(np.uint8)
    assert requests.find(keys[:5], 0) < 0
    short = model.observe(words[:3], 0, SECOND)
    requests.add(short, SECOND)
    long = model.observe(words[:7], 3, SECOND)
    requests.add(long, SECOND)
    requests.add(model.observe(words[100:104], 0, SECOND), SECOND)
    assert requests.usage(requests.find(keys[:9], SECOND)) is long
    assert requests.usage(requests.find(keys[:6], SECOND)) is short
    assert requests.find(keys[:2], SECOND) < 0
    assert requests.find(keys[:9], 2 * SECOND + REQUEST_NS_MAX) < 0
    for number in range(REQUESTS_KEPT):
        requests.add(model.observe(words[200 + number : 202 + number], 0, SECOND), SECOND)
    assert requests.find(keys[:9], SECOND) < 0
