"""What the LMCache adapter is made of, without LMCache: tasks, accounts, names."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import pytest

from kvtierd.connectors.lmcache_names import Names, block_keys_of, kind_of
from kvtierd.connectors.lmcache_residents import Resident, Residents
from kvtierd.connectors.lmcache_settings import Settings
from kvtierd.connectors.lmcache_tasks import Tasks
from kvtierd.connectors.settings import read_settings
from kvtierd.testing.waiting import wait_for


def key(number, model="m", salt="", group=0, rank=1):
    return SimpleNamespace(
        chunk_hash=number.to_bytes(4, "big"), model_name=model, cache_salt=salt, object_group_id=group, kv_rank=rank
    )


def resident(number, model="m"):
    handle = Names("").handle((model, "", 0), 4096)
    return Resident(key(number, model), handle, number.to_bytes(32, "big"))


def test_results_are_taken_once_and_each_end_is_told():
    told = threading.Semaphore(0)
    tasks = Tasks("test", itertools.count(1), told.release)
    first = tasks.submit(lambda: "a", lambda: "failed")
    second = tasks.submit(lambda: "b", lambda: "failed")
    assert told.acquire(timeout=60)
    assert told.acquire(timeout=60)
    assert tasks.take(first) == "a"
    assert tasks.take(first) is None
    assert tasks.take_all() == {second: "b"}
    tasks.close()


def test_case_02_a_task_that_raises_has_failed_and_the_next_one_runs(caplog):
    told = threading.Semaphore(0)
    tasks = Tasks("test", itertools.count(1), told.release)
    number = tasks.submit(lambda: 1 // 0, lambda: -1)
    after = tasks.submit(lambda: 7, lambda: -1)
    assert told.acquire(timeout=60)
    assert told.acquire(timeout=60)
    assert (tasks.take(number), tasks.take(after)) == (-1, 7)
    assert "a test failed" in caplog.text
    tasks.close()


def test_after_close_nobody_is_woken():
    told, go = threading.Semaphore(0), threading.Event()
    tasks = Tasks("test", itertools.count(1), told.release)
    tasks.submit(lambda: go.wait(60), lambda: False)
    closing = threading.Thread(target=tasks.close)
    closing.start()
    wait_for(lambda: tasks._closed)
    go.set()
    closing.join(60)
    assert not told.acquire(timeout=0)
    ran = []
    tasks.post(lambda: ran.append(1))
    assert not ran


def test_pages_go_on_where_they_ended_whatever_comes_and_goes():
    known = Residents()
    known.add([resident(i, "a" if i % 3 else "b") for i in range(10)])
    first, after = known.page(0, 3, "a")
    assert [item.key.chunk_hash[-1] for item in first] == [1, 2, 4]
    known.remove([resident(1).name, resident(5).name])
    known.add([resident(20, "a")])
    second, after = known.page(after, 3, "a")
    assert [item.key.chunk_hash[-1] for item in second] == [7, 8, 20]
    assert after is None


def test_case_19_beyond_the_limit_the_oldest_are_forgotten():
    known = Residents(limit=3)
    fresh, forgotten = known.add([resident(i) for i in range(5)])
    assert [item.key.chunk_hash[-1] for item in fresh] == [0, 1, 2, 3, 4]
    assert [item.key.chunk_hash[-1] for item in forgotten] == [0, 1]
    assert len(known) == 3
    assert known.add([resident(4)]) == ([], [])


def test_case_07_each_part_of_a_key_makes_another_name():
    names = Names("")
    made = set()
    for other in (key(1), key(2), key(1, rank=2), key(1, model="n"), key(1, salt="s"), key(1, group=1)):
        made.add(block_keys_of(names.handle(kind_of(other), 4096), [other]).tobytes())
    made.add(block_keys_of(names.handle(kind_of(key(1)), 8192), [key(1)]).tobytes())
    made.add(block_keys_of(Names("t").handle(kind_of(key(1)), 4096), [key(1)]).tobytes())
    assert len(made) == 8


def test_case_09_salts_that_read_alike_together_stay_apart():
    def digest(tenant, salt):
        return Names(tenant).handle(("m", salt, 0), 4096).digest

    assert len({digest("a", "bc"), digest("ab", "c"), digest("abc", ""), digest("", "abc")}) == 4


def test_sizes_that_were_met_are_looked_for_the_latest_first():
    names = Names("")
    for nbytes in (1, 2, 1, 3):
        names.met(("m", "any", 0), nbytes)
    assert names.sizes(("m", "other", 0)) == [3, 1, 2]
    assert names.sizes(("m", "", 1)) == []


def test_settings_that_do_not_exist_name_the_nearest():
    with pytest.raises(ValueError, match="adapter_params has no 'endpont': did you mean endpoint"):
        read_settings(Settings, {"endpont": ""}, "adapter_params")
    with pytest.raises(ValueError, match="load_timeout_ms"):
        read_settings(Settings, {"load_timeout_ms": 0}, "adapter_params")
