"""What the next life knows beside the blocks: heat, uses, what was learned, pins, and blocks in FP8."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvtierd.policy.return_eviction import ReturnEviction
from kvtierd.protocol import messages as m
from kvtierd.testing.held_files import HeldFiles
from kvtierd.testing.lives import fetched, life, on_loop, until
from kvtierd.testing.parts import Stored
from kvtierd.testing.rig import make_keys
from kvtierd.tiers.operator import Selection
from kvtierd.tiers.warm_host import Kept
from kvtierd.tiers.warm_snapshot import Pins, Snapshot, SnapshotFile
from tests.unit.tiers.lossy_blocks import LossyRig, settings

KEYS = make_keys(20)


@pytest.fixture
def files() -> Iterator[HeldFiles]:
    held = HeldFiles()
    yield held
    held.close()


def heat_of(rig, keys):
    blocks = rig.manager.copies.blocks
    return rig.manager._demand.heat(blocks.find(keys, 0)).tolist()


async def taken(rig):
    """Have a snapshot of how things are now."""
    memory = rig.manager._warm._memory
    if memory._writing is not None:
        await memory._writing  # of an earlier round
    rig.clock.advance(20)
    rig.manager.tick()
    await memory._writing


def learned(rig):
    return rig.manager.copies.host.policy.model._state.copy()


@on_loop
async def test_heat_and_the_time_of_the_last_use_are_those_of_the_life_before(files):
    async with life(files) as (rig, session, namespace):
        await rig.store(session, namespace, KEYS)
        rig.clock.advance(50)
        for _ in range(5):
            await fetched(rig, session, namespace, KEYS[:8])
        rig.clock.advance(10)
        before, age = heat_of(rig, KEYS), rig.manager.copies.blocks.table.last_access_s[:20].tolist()
        at = rig.clock.now_ns()
    async with life(files) as (rig, session, namespace):
        rig.clock.advance((at - rig.clock.now_ns()) / 1e9)
        assert heat_of(rig, KEYS) == pytest.approx(before)
        rows = rig.manager.copies.blocks.find(KEYS, 0)
        assert rig.manager.copies.blocks.table.last_access_s[rows].tolist() == age


@on_loop
async def test_eviction_goes_on_with_what_it_had_learned_and_takes_tails_first(files):
    async with life(files) as (rig, session, namespace):
        policy = rig.manager.copies.host.policy
        assert isinstance(policy, ReturnEviction)
        for turn in range(1, 6):
            await rig.store(session, namespace, make_keys(4 * turn, start=1))
            rig.clock.advance(30)
            await fetched(rig, session, namespace, make_keys(4 * turn, start=1))
        state, levels = learned(rig), policy.model.levels.copy()
        now = rig.clock.now_ns()
        slots = rig.manager.copies.blocks.table.host_slot[rig.manager.copies.blocks.find(make_keys(20, start=1), 0)]
        kinds, paces, _, parents = policy.remembered(slots)
        order = {slot: i for i, slot in enumerate(slots.tolist())}
    async with life(files) as (rig, session, namespace):
        policy = rig.manager.copies.host.policy
        again = learned(rig)
        assert (again[:7] == state[:7]).all(), "requests, observations and the secret"
        assert (policy.model.levels == levels).mean() > 0.9, "fitted anew of the same observations"
        rows = rig.manager.copies.blocks.find(make_keys(20, start=1), 0)
        slots = rig.manager.copies.blocks.table.host_slot[rows]
        same_kinds, same_paces, _, same_parents = policy.remembered(slots)
        assert (same_kinds == kinds).all()
        assert (same_paces == paces).all()
        here = {slot: i for i, slot in enumerate(slots.tolist())}
        assert [order.get(slot, -1) for slot in parents.tolist()] == [
            here.get(slot, -1) for slot in same_parents.tolist()
        ]
        rig.clock.advance(max(0, (now - rig.clock.now_ns()) / 1e9))
        cls = rig.manager.copies.host.pool.classes[0]
        await until(lambda: rig.manager.copies.host.all_proven)  # which holds them meanwhile
        victims = policy.victims(cls.id, rig.manager.copies.host.pool.holds, 3, 1000)
        assert victims.tolist() == slots[:-4:-1].tolist(), "the last blocks of the prompt, in that order"


@on_loop
async def test_what_another_version_had_learned_is_not_used_and_heat_is(files, monkeypatch):
    async with life(files) as (rig, session, namespace):
        await rig.store(session, namespace, KEYS)
        rig.clock.advance(5)
        await fetched(rig, session, namespace, KEYS)
        before = heat_of(rig, KEYS)
    monkeypatch.setattr("kvtierd.tiers.warm_memory.__version__", "0.0.0-other")
    async with life(files) as (rig, session, namespace):
        assert heat_of(rig, KEYS) == pytest.approx(before, rel=0.05)
        assert not (rig.manager.copies.host.policy.remembered(np.arange(1, dtype=np.int32))[0] > 1).any()
        assert await fetched(rig, session, namespace, KEYS) == 20


@on_loop
async def test_pins_of_operators_hold_on_and_can_be_taken_back(files):
    async with life(files) as (rig, session, namespace):
        await rig.store(session, namespace, KEYS)
        assert await rig.manager.operator.pin(Selection(key=KEYS[3].tobytes().hex())) == 1
        assert await rig.manager.operator.pin(Selection(key=KEYS[4].tobytes().hex())) == 1
    for _ in range(2):
        async with life(files) as (rig, session, namespace):
            await until(lambda: rig.manager.stats()["pinned_bytes"] > 0)
            table = rig.manager.copies.blocks.table
            assert table.pins[rig.manager.copies.blocks.find(KEYS[3:5], 0)].tolist() == [1, 1]
            assert table.pins[rig.manager.copies.blocks.find(KEYS[:3], 0)].max(initial=0) == 0
            for start in range(3, 20):  # more than the tier holds
                await rig.store(session, namespace, make_keys(30, start=start))
            assert await rig.lookup(session, namespace, KEYS[3:4]) == 1
            rig.check_accounts()
    async with life(files) as (rig, session, namespace):
        await until(lambda: rig.manager.stats()["pinned_bytes"] > 0)
        assert await rig.manager.operator.unpin(Selection()) == 2
        assert rig.manager.stats()["pinned_bytes"] == 0
        rig.check_accounts()


@on_loop
async def test_a_crash_loses_only_what_came_after_the_last_snapshot(files):
    async with life(files) as (rig, session, namespace):
        await rig.store(session, namespace, KEYS)
        for _ in range(3):
            await fetched(rig, session, namespace, KEYS)
            await taken(rig)
        before = heat_of(rig, KEYS)
        await fetched(rig, session, namespace, KEYS)
        crashed = files.snapshot()
    async with life(crashed) as (rig, session, namespace):
        rig.clock.advance(60)
        assert heat_of(rig, KEYS) == pytest.approx(before, rel=0.02)
        assert await fetched(rig, session, namespace, KEYS) == 20
    crashed.close()


@on_loop
async def test_uses_of_a_slot_that_changed_hands_are_nobodys(files):
    async with life(files) as (rig, session, namespace):
        await rig.store(session, namespace, KEYS)
        for _ in range(8):
            await fetched(rig, session, namespace, KEYS)
        await taken(rig)
        await rig.call(session, m.Delete(id=1, namespace=namespace), KEYS.tobytes())
        fresh = make_keys(20, start=9)
        await rig.store(session, namespace, fresh)
        crashed = files.snapshot()
    async with life(crashed) as (rig, session, namespace):
        assert await rig.lookup(session, namespace, KEYS) == 0
        assert max(heat_of(rig, fresh)) == 0, "the blocks before were hot"
        rig.check_accounts()
    crashed.close()


def lossy_life(files, store=None):
    """A rig of a namespace that allows loss, whose host tier begins with what is held."""
    return LossyRig(settings(capacity=8 << 20), store, kept=Kept(files, files.passed()))


@pytest.mark.parametrize("crash", [False, True])
@on_loop
async def test_blocks_in_fp8_are_served_from_where_they_lie(files, crash):
    async with lossy_life(files) as rig:
        session, number = await rig.client()
        keys = rig.keys(6)
        await rig.store(session, number, keys, rig.geometry)
        await rig.compressed(6)
        if crash:
            await taken(rig)
        held = files.snapshot() if crash else files
    async with lossy_life(held) as rig:
        session, number = await rig.client()
        assert rig.manager.copies.shapes.forms.count == 6
        assert rig.manager.stats()["warm_adopted_blocks"] == 6
        assert await rig.lookup(session, number, keys) == 6
        found, codecs = await rig.fetch(session, number, keys)
        assert codecs == b"\x02" * 6
        assert all((block == rig.lossy(key)).all() for block, key in zip(found, keys, strict=True))
        rig.check_accounts()
    if crash:
        held.close()


@on_loop
async def test_block_that_was_decoded_is_still_one_that_has_been_through_fp8(files):
    async with lossy_life(files) as rig:
        session, number = await rig.client()
        keys = rig.keys(4)
        await rig.store(session, number, keys, rig.geometry)
        await rig.compressed(4)
        await rig.fetch(session, number, keys)
        assert rig.manager.copies.shapes.forms.count == 0
    async with lossy_life(files) as rig:
        session, number = await rig.client()
        found, codecs = await rig.fetch(session, number, keys)
        assert codecs == b"\x02" * 4
        assert all((block == rig.lossy(key)).all() for block, key in zip(found, keys, strict=True))
        assert rig.manager.stats()["warm_corrupt_blocks"] == 0
        rig.check_accounts()


@on_loop
async def test_client_that_allows_no_loss_never_gets_them_in_the_next_life(files):
    async with lossy_life(files) as rig:
        session, number = await rig.client()
        keys = rig.keys(4)
        await rig.store(session, number, keys, rig.geometry)
        await rig.compressed(4)
    async with lossy_life(files) as rig:
        session, number = await rig.client(allow_loss=False)
        assert await rig.lookup(session, number, keys) == 0
        assert rig.manager.copies.shapes.forms.count == 0
        rig.check_accounts()


@on_loop
async def test_damaged_form_is_found_when_it_is_decoded(files):
    async with lossy_life(files) as rig:
        session, number = await rig.client()
        keys = rig.keys(3)
        await rig.store(session, number, keys, rig.geometry)
        await rig.compressed(3)
        copies = rig.manager.copies
        place = copies.shapes.forms.place_of(int(rig.rows(keys)[1]))
        copies.host.view(place.cls, place.slot)[7] ^= 1
    async with lossy_life(files) as rig:
        session, number = await rig.client()
        found, _ = await rig.fetch(session, number, keys)
        assert len(found) == 1
        rig.check_accounts()


@pytest.mark.parametrize("parts", [[128, 128, 256, 64, 192, 256], [512, 512], [64] * 16, [256, 512, 256]])
@on_loop
async def test_extents_of_other_sizes_are_where_they_were(files, parts):
    async with Stored(kept=Kept(files, files.passed())) as stored:
        assert await stored.reshape(parts) == 4
        extents = stored.rig.manager.copies.shapes.extents
    for _ in range(2):
        async with Stored(kept=Kept(files, files.passed())) as stored:
            assert await stored.rig.lookup(stored.session, stored.number, stored.keys) == 4
            assert stored.rig.manager.copies.shapes.extents == extents
            for begin, end in ((0, 1024), (100, 101), (500, 900)):
                await stored.part_is_right(begin, end)
            stored.rig.check_accounts()
    async with Stored(kept=Kept(files, files.passed())) as stored:
        await stored.whole_is_right()
        assert stored.rig.manager.copies.shapes.extents == 0


@on_loop
async def test_block_of_which_a_part_is_gone_does_not_come_back_in_parts(files):
    async with Stored(kept=Kept(files, files.passed())) as stored:
        await stored.reshape([64, 192], stored.keys[:1])
        await taken(stored.rig)
        copies = stored.rig.manager.copies
        row = copies.blocks.row_of(stored.keys[:1], 0)
        place = int(copies.shapes.pieces(np.array([row], np.int32), 256, 0, 64)[0, 2])
        slot = copies.blocks.table.host_slot[[place]]
        copies.evict_host(copies.host.pool.class_of(int(slot[0])), slot)
        crashed = files.snapshot()
    async with Stored(kept=Kept(crashed, crashed.passed())) as stored:
        stored.rig.check_accounts()
        await stored.whole_is_right()  # it was stored anew
    crashed.close()


def test_snapshot_is_whole_or_the_one_before():
    file = SnapshotFile()
    first, second = Snapshot(version="1", pins=[Pins(1, b"k" * 32)]), Snapshot(version="2", uses=b"u" * 100_000)
    assert file.read() is None
    file.write(first)
    assert file.read() == first
    for snapshot in (second, first, second):
        file.write(snapshot)
        assert file.read() == snapshot
    begin, nbytes, _ = file._header()
    os.pwrite(file.fd, b"x", begin + nbytes // 2)
    assert file.read() is None
    os.pwrite(file.fd, b"x", 20)
    assert file.read() is None
    assert os.fstat(file.fd).st_blocks * 512 < 300_000, "what was replaced is given back"
    file.close()
