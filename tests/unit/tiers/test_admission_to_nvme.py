"""What is written to nvme: whole prefixes that admission lets through, within the budget, and never behind a hole."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.policy.admission import DAY_NS
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import SHAPE, Rig, make_keys, small_settings

BLOCK = SHAPE.slot_bytes


def run(scenario, *, host=None, store=None, **nvme):
    settings = small_settings(**(host or {}))
    settings = msgspec.structs.replace(settings, nvme=msgspec.structs.replace(settings.nvme, **nvme))

    async def body():
        async with Rig(settings, store or MemoryStore()) as rig:
            session = rig.session()
            await scenario(rig, session, await rig.register(session))
            rig.check_accounts()

    asyncio.run(body())


async def flush(rig, session):
    await rig.call(session, m.Flush(id=1))


async def read(rig, session, ns, keys, **options):
    reply, _ = await rig.acquire(session, ns, keys, **options)
    await rig.release(session, reply)
    return reply.count


def on_disk(rig, keys):
    """Which of these blocks have a copy on nvme."""
    rows = rig.manager.copies.blocks.pages.lookup(keys, 0)
    flags = rig.manager.copies.blocks.table.flags[rows]
    return [bool(row >= 0 and flag & m.TIER_NVME) for row, flag in zip(rows, flags, strict=True)]


def count(rig, name):
    return rig.manager.stats()[name]


def test_case_27_one_cold_prompt_is_found_again_after_host_has_lost_it():
    async def scenario(rig, session, ns):
        keys = make_keys(6)
        await rig.store(session, ns, keys)
        await flush(rig, session)
        await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host", "gpu"]))
        assert await read(rig, session, ns, keys) == 6

    run(scenario)


def test_case_29_what_was_used_once_is_not_written_where_the_operator_wants_a_second_access():
    async def scenario(rig, session, ns):
        keys, other = make_keys(6), make_keys(5, start=2)
        await rig.store(session, ns, keys)
        await rig.store(session, ns, other)
        await flush(rig, session)
        assert count(rig, "offloaded_bytes") == 0
        assert count(rig, "offload_not_admitted_blocks") == 11
        assert await read(rig, session, ns, keys) == 6
        await flush(rig, session)
        assert on_disk(rig, keys) == [True] * 6
        assert on_disk(rig, other) == [False] * 5
        assert count(rig, "offloaded_bytes") == count(rig, "offloaded_again_bytes") == 6 * BLOCK

    run(scenario, admission="second-access")


def test_case_29_a_prompt_that_was_lost_and_comes_again_is_a_second_access():
    async def scenario(rig, session, ns):
        keys = make_keys(6)
        await rig.store(session, ns, keys)
        await rig.call(session, m.Delete(id=1, namespace=ns), keys.tobytes())
        await rig.store(session, ns, keys)
        await flush(rig, session)
        assert on_disk(rig, keys) == [True] * 6

    run(scenario, admission="second-access")


def test_a_conversation_that_went_on_once_takes_its_new_blocks_along():
    async def scenario(rig, session, ns):
        keys = make_keys(12)
        await rig.store(session, ns, keys[:6])
        await read(rig, session, ns, keys[:6])
        await rig.store(session, ns, keys[:10])
        await flush(rig, session)
        assert on_disk(rig, keys) == [True] * 10 + [False] * 2

    run(scenario, admission="second-access")


def test_commits_of_one_reservation_are_one_use():
    async def scenario(rig, session, ns):
        keys = make_keys(8)
        grant = await rig.reserve(session, ns, keys)
        sums = rig.fill(grant, keys)
        await rig.commit(session, grant, sums[:4], index=[0, 1, 2, 3])
        await rig.commit(session, grant, sums[4:], index=[4, 5, 6, 7])
        await flush(rig, session)
        assert count(rig, "offloaded_blocks") == 0

    run(scenario, admission="second-access")


def test_blocks_committed_out_of_order_go_to_disk_once_the_hole_is_filled():
    async def scenario(rig, session, ns):
        keys = make_keys(8)
        grant = await rig.reserve(session, ns, keys)
        sums = rig.fill(grant, keys)
        await rig.commit(session, grant, sums[4:], index=[4, 5, 6, 7])
        await flush(rig, session)
        assert on_disk(rig, keys) == [False] * 8
        await rig.commit(session, grant, sums[:4], index=[0, 1, 2, 3])
        await flush(rig, session)
        assert on_disk(rig, keys) == [True] * 8

    run(scenario)


@pytest.mark.parametrize("admission", ["all", "second-access", "budgeted"])
def test_case_29_no_24_hours_write_more_than_the_daily_budget(admission):
    budget = 40 * BLOCK

    async def scenario(rig, session, ns):
        written = []
        for prompt in range(120):
            keys = make_keys(1 + prompt % 5, start=prompt)
            await rig.store(session, ns, keys)
            await read(rig, session, ns, keys)
            await flush(rig, session)
            written.append((rig.clock.now_ns(), count(rig, "offloaded_bytes")))
            rig.clock.advance(1800)
        for begin, (since_ns, before) in enumerate(written):
            within = [total for now_ns, total in written[begin:] if now_ns - since_ns < DAY_NS]
            assert within[-1] - before <= budget
        assert written[-1][1] > budget
        assert count(rig, "offload_over_budget_blocks") > 0
        assert 0 <= count(rig, "write_budget_bytes") <= budget // 4

    run(scenario, admission=admission, daily_write_budget=budget)


def test_case_29_what_the_store_writes_again_counts_against_the_budget():
    async def scenario(rig, session, ns):
        keys = make_keys(4)
        await rig.store(session, ns, keys)
        await flush(rig, session)
        before = count(rig, "write_budget_bytes")
        rows = rig.manager.copies.blocks.find(keys, 0)
        entry = rig.manager.copies.namespaces[0]
        old = rig.manager.copies.extent(int(rows[0]), entry)
        assert rig.manager.on_disk.moved([(int(rows[0]), old, type(old)(0, 1 << 20, old.length))]) == [True]
        assert count(rig, "write_budget_bytes") == before - old.length

    run(scenario, daily_write_budget=400 * BLOCK)


def test_a_prefix_over_the_budget_is_left_out_whole_and_is_still_served():
    async def scenario(rig, session, ns):
        first, second = make_keys(7), make_keys(7, start=2)
        await rig.store(session, ns, first)
        await rig.store(session, ns, second)
        await flush(rig, session)
        assert on_disk(rig, first) == [True] * 7
        assert on_disk(rig, second) == [False] * 7
        assert count(rig, "offload_over_budget_blocks") == 7
        assert await read(rig, session, ns, second) == 7
        rig.clock.advance(86_400)
        await read(rig, session, ns, second)
        await flush(rig, session)
        assert on_disk(rig, second) == [True] * 7

    run(scenario, daily_write_budget=40 * BLOCK)


def test_nothing_is_written_behind_a_block_that_is_not_on_disk():
    async def scenario(rig, session, ns):
        keys = make_keys(12)
        grant = await rig.reserve(session, ns, keys[:7])
        await rig.commit(session, grant, rig.fill(grant, keys[:7]))
        later = await rig.call(session, m.Reserve(id=1, namespace=ns, parent=keys[6].tobytes()), keys[7:].tobytes())
        grant = type(grant)(later.reply.reservation, np.frombuffer(later.frames[0], m.SLOT_DTYPE))
        await rig.commit(session, grant, rig.fill(grant, keys[7:]))
        await flush(rig, session)
        assert count(rig, "offloaded_blocks") == 0
        assert count(rig, "offload_behind_hole_blocks") == 5
        await read(rig, session, ns, keys[7:], parent=keys[6].tobytes())
        assert count(rig, "offload_behind_hole_blocks") == 10
        await read(rig, session, ns, keys[:7])
        await read(rig, session, ns, keys[7:], parent=keys[6].tobytes())
        await flush(rig, session)
        assert on_disk(rig, keys) == [True] * 12

    run(scenario, admission="second-access")


def test_a_parent_of_another_length_is_refused():
    async def scenario(rig, session, ns):
        for request in (m.Reserve, m.Acquire, m.Get):
            with pytest.raises(RequestError, match="parent has 5 bytes") as caught:
                await rig.call(session, request(id=1, namespace=ns, parent=b"short"), make_keys(1).tobytes())
            assert caught.value.code == ErrorCode.BAD_ARGUMENT

    run(scenario)


def test_a_block_that_the_disk_refused_is_offered_again_later_and_not_at_every_read():
    store = MemoryStore()

    async def scenario(rig, session, ns):
        keys = make_keys(4)
        store.fail_writes = 2
        await rig.store(session, ns, keys)
        await flush(rig, session)
        assert on_disk(rig, keys) == [False, False, True, True]
        store.fail_writes = 1
        for _ in range(5):
            await read(rig, session, ns, keys)
        await flush(rig, session)
        assert (store.fail_writes, count(rig, "offload_failed_blocks")) == (1, 2)
        store.fail_writes = 0
        rig.clock.advance(11)
        await read(rig, session, ns, keys)
        await flush(rig, session)
        assert on_disk(rig, keys) == [True] * 4

    run(scenario, store=store)


def test_behind_a_block_that_the_disk_refused_nothing_is_written_for_a_while():
    store = MemoryStore()

    async def scenario(rig, session, ns):
        keys = make_keys(6)
        store.fail_writes = 2
        await rig.store(session, ns, keys[:4])
        await flush(rig, session)
        await rig.store(session, ns, keys)
        await flush(rig, session)
        assert on_disk(rig, keys) == [False, False, True, True, False, False]
        assert await rig.store(session, ns, make_keys(2, start=3)) == 2
        await flush(rig, session)
        assert on_disk(rig, make_keys(2, start=3)) == [True] * 2, "a new prefix tries the disk"
        rig.clock.advance(11)
        await read(rig, session, ns, keys)
        await flush(rig, session)
        assert on_disk(rig, keys) == [True] * 6

    run(scenario, store=store)


def test_case_29_copies_that_went_unread_are_counted():
    store = MemoryStore()

    async def scenario(rig, session, ns):
        keys = make_keys(5)
        await rig.store(session, ns, keys)
        await flush(rig, session)
        await rig.call(session, m.Purge(id=1, namespace=ns, tiers=["host", "gpu"]))
        await read(rig, session, ns, keys[:2])
        digest = rig.manager.copies.namespaces[0].digest
        for key in keys:
            store.reclaim(digest, key.tobytes())
        assert count(rig, "nvme_unread_blocks") == 3 - min(3, count(rig, "prefetched_blocks"))

    run(scenario, store=store)


def test_a_clean_stop_writes_what_was_admitted_and_nothing_else():
    store = MemoryStore()

    async def scenario(rig, session, ns):
        await rig.store(session, ns, make_keys(5))
        await rig.store(session, ns, make_keys(5, start=2))
        await read(rig, session, ns, make_keys(5))
        await rig.manager.drain()
        assert len(store.blocks) == 5

    run(scenario, store=store, admission="second-access")


def test_a_clean_stop_writes_everything_by_default():
    store = MemoryStore()

    async def scenario(rig, session, ns):
        await rig.store(session, ns, make_keys(5))
        await rig.store(session, ns, make_keys(5, start=2))
        await rig.manager.drain()
        assert len(store.blocks) == 10

    run(scenario, store=store)
