"""The adapter as LMCache's controllers call it, made by LMCache's own factory, with a real daemon."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvtierd import Client
from kvtierd.testing.waiting import wait_for

SIZE = 64 << 10


def same(loaded, stored):
    return all((a.raw_data == b.raw_data).all() for a, b in zip(loaded, stored, strict=True))


def test_what_was_stored_is_found_and_loaded(caller, keys, objects):
    mine, source, target = keys(40), objects(40, seed=1), objects(40)
    result = caller.store(mine, source)
    assert (result.is_successful(), result.bytes_transferred()) == (True, 40 * SIZE)
    assert caller.find(mine) == list(range(40))
    assert caller.load(mine, target) == list(range(40))
    assert same(target, source)
    again = caller.store(mine, source)
    assert (again.is_successful(), again.bytes_transferred()) == (True, 0)


def test_descriptors_differ_and_wake_nobody_before_something_ended(caller):
    made = caller.adapter
    assert len({made.get_store_event_fd(), made.get_lookup_and_lock_event_fd(), made.get_load_event_fd()}) == 3
    assert made.pop_completed_store_tasks() == {}
    assert made.query_load_result(4711) is None


def test_objects_with_holes_between_them_are_answered_one_by_one(caller, keys, objects):
    mine, source, target = keys(12), objects(12, seed=2), objects(12)
    there = [1, 2, 5, 6, 7, 11]
    assert caller.store([mine[i] for i in there], [source[i] for i in there]).is_successful()
    assert caller.find(mine) == there
    assert caller.load(mine, target) == there
    assert same([target[i] for i in there], [source[i] for i in there])


def test_case_07_model_salt_group_rank_and_size_each_make_another_object(caller, keys, objects, layout):
    mine, source = keys(1, model="m"), objects(1, seed=3)
    assert caller.store(mine, source).is_successful()
    others = [
        keys(1, model="n"),
        keys(1, model="m", salt="s"),
        keys(1, model="m", group=1),
        keys(1, model="m", rank=0x02000200),
    ]
    for other in others:
        assert caller.find(other) == []
        assert caller.load(other, objects(1)) == []
    assert caller.load(mine, objects(1, SIZE // 2)) == []
    assert caller.find(mine, layout(SIZE // 2)) == []
    assert caller.find(mine, layout(SIZE)) == [0]


def test_groups_and_ranks_of_one_request_are_served_together(caller, keys, objects, layout):
    rows = [keys(3, model="rows", group=group, rank=rank) for group in (0, 1) for rank in (7, 8)]
    mine = [key for row in rows for key in row]
    source = objects(6, seed=4) + objects(6, SIZE // 2, seed=5)
    assert caller.store(mine, source).is_successful()
    assert caller.find(mine, layout(SIZE) | layout(SIZE // 2, 1)) == list(range(12))
    target = objects(6) + objects(6, SIZE // 2)
    assert caller.load(mine, target) == list(range(12))
    assert same(target, source)


def test_case_08_another_process_that_knows_the_layout_finds_them(
    caller, adapter_at, calling, daemon, keys, objects, layout
):
    mine, source, target = keys(4), objects(4, seed=6), objects(4)
    caller.store(mine, source)
    other = calling(adapter_at(daemon.endpoint))
    assert other.find(mine, layout(SIZE)) == [0, 1, 2, 3]
    assert other.load(mine, target) == [0, 1, 2, 3]
    assert same(target, source)
    other.adapter.close()


def test_case_18_locks_are_counted_and_end(caller, daemon, keys, objects):
    mine = keys(3)
    caller.store(mine, objects(3, seed=7))
    caller.find(mine)
    caller.find(mine[:1])
    assert pinned(daemon) in (0, 3 * SIZE)  # none where they were in nvme already
    caller.adapter.submit_unlock(mine)
    caller.adapter.submit_unlock(mine)
    caller.adapter.submit_unlock(mine)
    wait_for(lambda: pinned(daemon) == 0)
    assert caller.adapter.report_status()["locked_key_count"] == 0


def pinned(daemon):
    with Client(daemon.endpoint, timeout_s=20) as probe:
        return probe.stats()["pinned_bytes"]


def test_listing_and_usage_follow_stores_and_deletes(caller, keys, objects):
    mine, others = keys(7, model="listed", salt="user"), keys(2, model="other")
    caller.store(mine, objects(7, seed=8))
    caller.store(others, objects(2, seed=9))
    made = caller.adapter
    seen, cursor = [], None
    while True:
        page = made.list_l2_keys("listed", 3, cursor)
        seen += [(entry.key.to_object_key(), entry.size_bytes) for entry in page.entries]
        if (cursor := page.next_page_token) is None:
            break
    assert seen == [(key, SIZE) for key in mine]
    usage = made.get_usage()
    assert (usage.total_bytes_used, usage.total_capacity_bytes) == (9 * SIZE, 0)
    assert dict(usage.bytes_by_cache_salt) == {"user": 7 * SIZE, "": 2 * SIZE}
    made.delete(mine[2:4])
    assert caller.find(mine) == [0, 1, 4, 5, 6]
    assert made.get_usage().total_bytes_used == 7 * SIZE
    with pytest.raises(ValueError, match="page_size is 0"):
        made.list_l2_keys(page_size=0)
    with pytest.raises(ValueError, match="cursor 'x'"):
        made.list_l2_keys(cursor="x")


def test_what_somebody_else_removed_leaves_the_accounts(caller, daemon, keys, objects):
    mine = keys(5, model="purged")
    caller.store(mine, objects(5, seed=10))
    with Client(daemon.endpoint, timeout_s=20, transfer_timeout_s=20) as other:
        other.purge()
    wait_for(lambda: caller.adapter.get_usage().total_bytes_used == 0)
    assert caller.adapter.list_l2_keys().entries == ()


def test_sizes_that_cannot_be_stored_fail_their_task_and_no_other(caller, keys, objects):
    prime = 1_000_003
    assert not caller.store(keys(1), objects(1, prime, seed=11)).is_successful()
    assert caller.load(keys(1), objects(1, prime)) == []
    assert caller.store(keys(1), objects(1, seed=12)).is_successful()


def test_case_03_damaged_bytes_are_no_hit(caller, daemon, keys, objects):
    """Written by another client of the same namespace, with sums of other bytes."""
    from kvtierd.connectors.lmcache_names import Names, block_keys_of, kind_of

    mine = keys(3, model="damaged")
    caller.store([mine[0], mine[2]], objects(2, seed=13))
    handle = Names("").handle(kind_of(mine[1]), SIZE)
    with (
        Client(daemon.endpoint, timeout_s=20) as other,
        other.reserve(handle, block_keys_of(handle, [mine[1]])) as slot,
    ):
        slot.views[0][:] = 1
        slot.commit(sums=np.array([[1]], np.uint64))
    assert caller.load(mine, objects(3)) == [0, 2]
    assert caller.find(mine) == [0, 2], "it is deleted"


def test_wrong_parameters_name_the_right_ones(adapter_at):
    with pytest.raises(ValueError, match="did you mean endpoint"):
        adapter_at("", endpont="ipc:///nowhere")


def test_without_a_daemon_everything_ends_at_once(adapter_at, calling, tmp_path, keys, objects):
    away = calling(adapter_at(f"ipc://{tmp_path}/no.sock"))
    begin = time.monotonic()
    assert not away.store(keys(2), objects(2)).is_successful()
    assert away.find(keys(2)) == []
    assert away.load(keys(2), objects(2)) == []
    away.adapter.submit_unlock(keys(2))
    away.adapter.delete(keys(2))
    assert away.adapter.list_l2_keys().entries == ()
    assert time.monotonic() - begin < 20, "no deadline was waited for"
    away.adapter.close()


def test_case_17_killed_and_started_again_it_serves_what_was_durable(make_daemon, adapter_at, calling, keys, objects):
    with make_daemon("killed") as daemon:
        mine, source, target = keys(6), objects(6, seed=14), objects(6)
        caller = calling(adapter_at(daemon.endpoint))
        caller.store(mine, source)
        with Client(daemon.endpoint, timeout_s=20, transfer_timeout_s=20) as probe:
            probe.flush()
        daemon.kill()
        assert caller.find(mine) == []
        assert caller.adapter.get_usage().total_bytes_used == 6 * SIZE, "nobody said that they are gone"
        daemon.start()
        wait_for(lambda: caller.find(mine) == list(range(6)))
        assert caller.load(mine, target) == list(range(6))
        assert same(target, source)
        caller.adapter.close()


def test_case_15_closing_with_work_under_way_leaves_nothing(adapter_at, calling, daemon, keys, objects):
    made = adapter_at(daemon.endpoint)
    for seed in range(5):
        made.submit_store_task(keys(8), objects(8, 1 << 20, seed=seed))
    caller = calling(made)
    caller.find(keys(2))
    made.close()
    wait_for(lambda: pinned(daemon) == 0)
