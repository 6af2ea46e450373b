"""What of the life before cannot be used, and what that costs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvtierd.core.units import MIB
from kvtierd.index import warm_rows
from kvtierd.testing.held_files import HeldFiles
from kvtierd.testing.lives import fetched, life, on_loop
from kvtierd.testing.rig import make_keys
from kvtierd.tiers import warm_table

KEYS = make_keys(20)


@pytest.fixture
def files() -> Iterator[HeldFiles]:
    held = HeldFiles()
    yield held
    held.close()


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ({"capacity": 4 * MIB}, "it is of 2 chunks of 1.00 MiB; the host tier has 4 of 1.00 MiB now"),
        (
            {"capacity": 4 * MIB, "chunk_bytes": 2 * MIB},
            "of 2 chunks of 1.00 MiB; the host tier has 2 of 2.00 MiB",
        ),
    ],
)
@on_loop
async def test_another_shape_of_the_tier_begins_empty_and_says_why(files, host, reason):
    async with life(files) as (rig, session, namespace):
        await rig.store(session, namespace, KEYS)
    before = files.names
    async with life(files, **host) as (rig, session, namespace):
        assert await rig.lookup(session, namespace, KEYS) == 0
        assert reason in rig.manager.stats()["warm_refusal"]
        assert await rig.store(session, namespace, KEYS) == 20
    assert "t" in before
    async with life(files, **host) as (rig, session, namespace):
        assert await fetched(rig, session, namespace, KEYS) == 20
    assert len(files.names) == len(set(files.names)), "what is no use any more is still kept"


@on_loop
async def test_another_format_begins_empty_and_says_why(files, monkeypatch):
    async with life(files) as (rig, session, namespace):
        await rig.store(session, namespace, KEYS)
    monkeypatch.setattr(warm_table, "FORMAT", 9)
    async with life(files) as (rig, session, namespace):
        assert await rig.lookup(session, namespace, KEYS) == 0
        assert "it has format 1; this version writes 9" in rig.manager.stats()["warm_refusal"]


@on_loop
async def test_missing_table_begins_empty_and_a_missing_chunk_costs_its_own_blocks(files):
    async with life(files) as (rig, session, namespace):
        await rig.store(session, namespace, KEYS)
        await rig.store(session, namespace, make_keys(80, start=3))
        chunks = [name for name in files.names if name.startswith("c")]
        without_table, without_chunk = files.snapshot(), files.snapshot()
    without_table.forget("t")
    async with life(without_table) as (rig, session, namespace):
        assert await rig.lookup(session, namespace, KEYS) == 0
        assert "the block table is not among it" in rig.manager.stats()["warm_refusal"]
    without_chunk.forget(chunks[-1])
    async with life(without_chunk) as (rig, session, namespace):
        assert 0 < rig.manager.stats()["warm_adopted_blocks"] < 100
        assert rig.manager.stats()["host_ready_bytes"] == 2 * MIB
        rig.check_accounts()
    without_table.close()
    without_chunk.close()


@on_loop
async def test_torn_row_is_a_miss_and_no_other_is(files):
    async with life(files) as (rig, session, namespace):
        await rig.store(session, namespace, KEYS)
        table, host = rig.manager.copies.blocks, rig.manager.copies.host
        slot = int(table.table.host_slot[table.row_of(KEYS[4:5], 0)])
        slab, index = host.pool.place(slot)
        for word in range(warm_rows.WORDS):
            torn = files.snapshot()
            fd = dict(torn.passed())["t"]
            at = host.table._rows_at + (slab * host.table.stride + index) * 64 + word * 8
            value = int.from_bytes(os.pread(fd, 8, at), "little") ^ (1 << 17)
            os.pwrite(fd, value.to_bytes(8, "little"), at)
            async with life(torn) as (other, session2, namespace2):
                assert await fetched(other, session2, namespace2, KEYS) == 4
                assert await fetched(other, session2, namespace2, KEYS[5:]) == 15
            torn.close()
