"""Namespaces of tenants have names of their own on disk; whatever is done there goes by those."""

from __future__ import annotations

import asyncio

import pytest

from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import Rig, make_keys, small_settings


@pytest.mark.parametrize("tenant", ["default", "b"])
def test_blocks_deleted_while_they_are_written_do_not_stay_on_disk(tenant: str) -> None:
    store = MemoryStore()

    async def scenario() -> None:
        async with Rig(small_settings(), store) as rig:
            session = rig.session(tenant=tenant)
            space, keys = await rig.register(session), make_keys(4)
            store.stall.clear()
            await rig.store(session, space, keys)
            for _ in range(20):
                await asyncio.sleep(0.005)  # until they are being written
            await rig.call(session, m.Delete(id=1, namespace=space), keys.tobytes())
            store.stall.set()
            await rig.call(session, m.Flush(id=1))
            assert rig.manager.stats()["offloaded_blocks"] == len(keys), "they were written before they were struck out"
        assert not store.blocks

    asyncio.run(scenario())
