"""While the backlog is written: no more stores, reads as ever, and a number that says how much is left."""

from __future__ import annotations

import asyncio

import pytest

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import SHAPE, Rig, make_keys


def test_reads_go_on_and_stores_do_not_until_the_backlog_is_written() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        store.stall.clear()
        async with Rig(store=store) as rig:
            session = rig.session()
            ns = await rig.register(session)
            assert await rig.store(session, ns, make_keys(10)) == 10
            assert rig.manager.backlog_bytes == 10 * SHAPE.slot_bytes
            draining = asyncio.create_task(rig.manager.drain())
            await asyncio.sleep(0.02)
            assert not draining.done()
            assert await rig.lookup(session, ns, make_keys(10)) == 10
            reply, _ = await rig.acquire(session, ns, make_keys(10))
            assert reply.count == 10
            await rig.release(session, reply)
            with pytest.raises(RequestError) as caught:
                await rig.store(session, ns, make_keys(2, start=7))
            assert caught.value.code == ErrorCode.SHUTTING_DOWN
            store.stall.set()
            await draining
            assert rig.manager.backlog_bytes == 0
            assert len(store.blocks) == 10

    asyncio.run(scenario())


def test_stores_are_taken_again_when_an_operator_says_so() -> None:
    async def scenario() -> None:
        async with Rig(store=MemoryStore()) as rig:
            session = rig.session()
            ns = await rig.register(session)
            rig.manager.take_stores(yes=False)
            with pytest.raises(RequestError):
                await rig.store(session, ns, make_keys(2))
            rig.manager.take_stores(yes=True)
            assert await rig.store(session, ns, make_keys(2)) == 2

    asyncio.run(scenario())
