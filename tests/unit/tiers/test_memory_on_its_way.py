"""Just after a start the arena is still being allocated: requests wait for it instead of being turned away."""

from __future__ import annotations

import asyncio

from kvtierd.core.units import MIB
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import SHAPE, Rig, make_keys, pattern, small_settings

CHUNKS = 6
TOTAL = CHUNKS * (MIB // SHAPE.slot_bytes)


def run(scenario, store=None):
    async def body():
        rig = Rig(settings=small_settings(capacity=CHUNKS * MIB), store=store)
        await rig.manager.start()
        session = rig.session()
        await scenario(rig, session, await rig.register(session))
        rig.check_accounts()
        await rig.manager.close()

    asyncio.run(body())


def test_a_store_right_after_the_start_gets_all_the_room_there_will_be():
    async def scenario(rig, session, ns):
        grant = await rig.reserve(session, ns, make_keys(TOTAL))
        assert (grant.descriptors["status"] == m.SLOT_GRANTED).all()

    run(scenario)


def test_a_read_right_after_the_start_gets_its_whole_prefix():
    store = MemoryStore()

    async def first(rig, session, ns):
        await rig.store(session, ns, make_keys(TOTAL - 5))
        await rig.call(session, m.Flush(id=1))

    async def second(rig, session, ns):
        reply, descriptors = await rig.acquire(session, ns, make_keys(TOTAL - 5))
        assert reply.count == TOTAL - 5
        for key, descriptor in list(zip(make_keys(TOTAL - 5), descriptors, strict=True))[::17]:
            assert (rig.read(descriptor) == pattern(key, SHAPE)).all()
        await rig.release(session, reply)

    run(first, store)
    run(second, MemoryStore(store))
