"""Blocks that leave nvme for two reasons, and reads that come too late for them: what is counted, and what is said."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from kvtierd.core.errors import StorageError
from kvtierd.protocol import messages as m
from kvtierd.storage.interface import Extent, GoneError, ReadItem
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import Rig, make_keys

COUNT = 40


class RecyclingStore(MemoryStore):
    """Its blocks are recycled between the lookup and the read; `doubt` is what a failed sync tells."""

    recycled = False

    async def read(self, items: Sequence[ReadItem]) -> list[StorageError | None]:
        if not self.recycled:
            return await super().read(items)
        return [GoneError(f"block {item.key.hex()[:16]} is no longer there") for item in items]

    def on_reclaim(self, callback, lost=None) -> None:  # type: ignore[no-untyped-def]
        super().on_reclaim(callback)
        self.doubt = lost

    def extents(self) -> list[tuple[int, Extent]]:
        return [(self.tags[extent.offset], extent) for extent, _, _ in self.blocks.values()]


async def on_disk_only(rig: Rig):  # type: ignore[no-untyped-def]
    session = rig.session()
    space = await rig.register(session)
    await rig.store(session, space, make_keys(COUNT))
    await rig.call(session, m.Flush(id=1))
    await rig.call(session, m.Purge(id=1, namespace=space, tiers=["host"]))
    return session, space


def test_a_reader_that_lost_to_recycling_sees_a_miss_and_the_log_one_line(caplog: pytest.LogCaptureFixture) -> None:
    store = RecyclingStore()

    async def scenario() -> None:
        async with Rig(store=store) as rig:
            session, space = await on_disk_only(rig)
            store.recycled = True
            with caplog.at_level(logging.INFO):
                reply, _ = await rig.acquire(session, space, make_keys(COUNT))
            assert reply.count == 0
            counters = rig.manager.copies.counters
            assert counters["onboard_failed_blocks"] == counters["onboard_corrupt_blocks"] == 0
            rig.check_accounts()

    asyncio.run(scenario())
    told = [record for record in caplog.records if "recycled before they could be read" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.INFO]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("recycled", [True, False])
def test_blocks_lost_in_a_failed_sync_are_not_counted_as_recycled(recycled: bool) -> None:
    store = RecyclingStore()

    async def scenario() -> None:
        async with Rig(store=store) as rig:
            session, space = await on_disk_only(rig)
            (store._callback if recycled else store.doubt)(store.extents())
            assert rig.manager.copies.counters["nvme_reclaimed_blocks"] == (COUNT if recycled else 0)
            assert await rig.lookup(session, space, make_keys(COUNT)) == 0
            rig.check_accounts()

    asyncio.run(scenario())
