"""KvtierdTier as vLLM's tiering manager calls it, made by vLLM's factory, with a real daemon; and inside that manager,
behind vLLM's own CPU tier."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest

from kvtierd.testing.waiting import wait_for

pytestmark = pytest.mark.filterwarnings("default")  # vLLM is imported here, and its dependencies are not ours

CHUNK, CHUNKS = 48 << 10, 12
_numbers = itertools.count()


@pytest.fixture
def spec():
    """A specification as vLLM's scheduler makes it; only fields that tell caches apart matter here."""

    def make(*, events=False, **changes):
        from vllm.v1.kv_offload.base import OffloadingKVEventsConfig
        from vllm.v1.kv_offload.config import (
            OffloadingCacheConfig,
            OffloadingConfig,
            OffloadingGroupConfig,
            OffloadingModelConfig,
            OffloadingParallelConfig,
        )

        facts = {"model": "m", "dtype": "bfloat16", "layers": ("a", "b"), "tp": 1, **changes}
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=facts["layers"], group_id=0),),
            worker_kv_bytes_per_block=CHUNK,
            enable_kv_cache_events=events,
            extra_config={},
            engine_id="e",
            model=OffloadingModelConfig(name=facts["model"], dtype=facts["dtype"]),
            cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=OffloadingParallelConfig(
                rank=0,
                world_size=facts["tp"],
                tp_size=facts["tp"],
                pp_size=1,
                pcp_size=1,
                dcp_size=1,
                data_parallel_index=0,
                data_parallel_size=1,
                data_parallel_rank_local=None,
                is_parallelism_agnostic=False,
            ),
        )
        events_config = OffloadingKVEventsConfig(enable_kv_cache_events=events, self_describing_kv_events=False)
        return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=events_config)

    return make


@pytest.fixture
def tier(daemon, spec):
    made = []

    def make(memory, *, of=None, **settings):
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        known = {"endpoint": daemon.endpoint, "lookup_timeout_ms": 20000, "revision": "r", "tenant_salt": "t"}
        config = {"type": "KvtierdTier", "module_path": "kvtierd.connectors.vllm_tier", **known, **settings}
        built = SecondaryTierFactory.create_secondary_tier(config, memoryview(memory), of or spec())
        made.append(built)
        return built

    yield make
    for built in made:
        built.shutdown()


def memory(seed=None):
    whole = np.zeros((CHUNKS, CHUNK), np.uint8)
    if seed is not None:
        whole[:] = np.random.default_rng(seed).integers(0, 256, whole.shape, np.uint8)
    return whole


def some_keys(count, group=0):
    from vllm.v1.kv_offload.base import make_offload_key

    of = next(_numbers)
    return [make_offload_key(f"{of}-{i}".encode().ljust(32, b"."), group) for i in range(count)]


def job(keys, places, *, load):
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

    return TransferJob(next(_numbers), keys, np.array(places), is_promotion=load, req_context=ReqContext("r"))


def finished(tier):
    results = []
    wait_for(lambda: results.extend(tier.get_finished_jobs()) or results)
    (result,) = results
    return result


def looked_up(tier, keys, request="r"):
    from vllm.v1.kv_offload.base import LookupResult, ReqContext

    context = ReqContext(request)
    answers = []

    def answered():
        answers[:] = [tier.lookup(key, context) for key in keys]
        tier.on_schedule_end(None)
        return LookupResult.RETRY not in answers

    wait_for(answered)
    tier.on_request_finished(context)
    return [answer is LookupResult.HIT for answer in answers]


def test_the_contract_is_whole():
    from vllm.v1.kv_offload.base import Medium
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    from kvtierd.connectors.vllm_tier import KvtierdTier

    assert issubclass(KvtierdTier, SecondaryTierManager)
    assert not KvtierdTier.__abstractmethods__
    assert KvtierdTier.medium is Medium.STORAGE


def test_chunks_go_out_and_come_back_to_other_places(tier):
    source, target = memory(1), memory()
    out, keys = tier(source), some_keys(5)
    out.submit_store(job(keys, [7, 0, 3, 11, 2], load=False))
    stored = finished(out)
    assert (stored.success, stored.transfer_bytes) == (True, 5 * CHUNK)
    back = tier(target)
    assert looked_up(back, keys) == [True] * 5
    back.submit_load(job(keys, [1, 2, 3, 4, 5], load=True))
    assert finished(back).success
    assert (target[[1, 2, 3, 4, 5]] == source[[7, 0, 3, 11, 2]]).all()
    assert not target[[0, 6, 7]].any()


def test_a_load_of_which_a_part_is_missing_says_which_arrived_and_what_is_a_miss(tier):
    source, target = memory(2), memory()
    keys = some_keys(4)
    out = tier(source)
    out.submit_store(job([keys[0], keys[2]], [0, 2], load=False))
    assert finished(out).success
    back = tier(target)
    assert looked_up(back, keys) == [True, False, True, False]
    back.submit_load(job(keys, [0, 1, 2, 3], load=True))
    result = finished(back)
    assert (result.success, set(result.successful_keys)) == (False, {keys[0], keys[2]})
    assert (target[[0, 2]] == source[[0, 2]]).all()


def test_case_02_what_failed_to_load_is_a_miss_for_requests_that_know_of_it(tier):
    from vllm.v1.kv_offload.base import LookupResult, ReqContext

    built, keys = tier(memory(3)), some_keys(1)
    built.submit_store(job(keys, [0], load=False))
    finished(built)
    context = ReqContext("asks")

    def answer():
        result = built.lookup(keys[0], context)
        built.on_schedule_end(None)
        return result

    wait_for(lambda: answer() is LookupResult.HIT)
    built._client.delete(built._handle, built._names(keys))
    built.submit_load(job(keys, [1], load=True))
    assert not finished(built).success
    assert answer() is LookupResult.MISS
    built.on_request_finished(context)


@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"layers": ("a",)}, {"tp": 2}, {"model": "n"}])
def test_case_07_whatever_vllm_tells_apart_is_another_namespace(tier, spec, change):
    built, keys = tier(memory(4)), some_keys(1)
    built.submit_store(job(keys, [0], load=False))
    assert finished(built).success
    assert looked_up(tier(memory(), of=spec(**change)), keys) == [False]
    assert looked_up(tier(memory(), revision="other"), keys) == [False]
    assert looked_up(built, keys) == [True]


def test_case_25_groups_have_chunks_of_their_own(tier):
    from vllm.v1.kv_offload.base import get_offload_block_hash, make_offload_key

    built, keys = tier(memory(5)), some_keys(1)
    built.submit_store(job(keys, [0], load=False))
    finished(built)
    assert looked_up(built, [make_offload_key(get_offload_block_hash(keys[0]), 1)]) == [False]


def test_events_tell_of_what_was_stored_and_only_where_vllm_publishes_them(tier, spec):
    keys = some_keys(2)
    built = tier(memory(6), of=spec(events=True), enable_kv_events=True)
    built.submit_store(job(keys, [0, 1], load=False))
    finished(built)
    (event,) = built.take_events()
    assert (list(event.keys), event.removed, event.medium) == (keys, False, built.medium)
    assert list(built.take_events()) == []
    silent = tier(memory(6), enable_kv_events=True)
    silent.submit_store(job(some_keys(2), [0, 1], load=False))
    finished(silent)
    assert list(silent.take_events()) == []


def test_draining_leaves_every_result_to_be_taken(tier):
    built = tier(memory(7))
    jobs = [job(some_keys(CHUNKS), range(CHUNKS), load=bool(i % 2)) for i in range(8)]
    for item in jobs:
        (built.submit_load if item.is_promotion else built.submit_store)(item)
    built.drain_jobs()
    results = {result.job_id: result.success for result in built.get_finished_jobs()}
    assert results == {item.job_id: not item.is_promotion for item in jobs}


def test_without_a_daemon_jobs_fail_and_lookups_miss_at_once(tier, tmp_path):
    built, keys = tier(memory(), endpoint=f"ipc://{tmp_path}/no.sock"), some_keys(2)
    begin = time.monotonic()
    assert looked_up(built, keys) == [False, False]
    for load in (False, True):
        (built.submit_load if load else built.submit_store)(job(keys, [0, 1], load=load))
        assert not finished(built).success
    assert time.monotonic() - begin < 20


def test_settings_that_do_not_exist_and_weights_that_nobody_knows_are_named(tier, spec):
    with pytest.raises(ValueError, match="did you mean endpoint"):
        tier(memory(), endpont="")
    with pytest.raises(ValueError, match="cannot tell which weights nobody/knows are"):
        tier(memory(), of=spec(model="nobody/knows"), revision="")


def managed(spec, tier, name):
    """vLLM's tiering manager over its CPU tier of four chunks in shared memory, and ours."""
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
    from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

    region = SharedOffloadRegion(f"kvtierd-test-{name}", 4, 0, CHUNK, CHUNK)
    primary = CPUPrimaryTierOffloadingManager(
        num_chunks=4, cache_policy="lru", cache_policy_module_path=None, enable_events=False, mmap_region=region
    )
    return TieringOffloadingManager(primary, [tier(primary.get_kv_memoryview(), of=spec())]), primary


def step(manager, requests=()):
    from vllm.v1.kv_offload.base import ScheduleEndContext

    manager.on_schedule_end(ScheduleEndContext(new_req_ids=list(requests), preempted_req_ids=[]))


def test_behind_vllms_cpu_tier_chunks_are_found_by_another_engine(spec, tier, tmp_path):
    from vllm.v1.kv_offload.base import LookupResult, ReqContext

    keys, context = some_keys(3), ReqContext("writes")
    first, primary = managed(spec, tier, f"{tmp_path.name}-a")
    first.on_new_request(context)
    stored = first.prepare_store(keys, context)
    rows = np.frombuffer(primary.get_kv_memoryview().cast("B"), np.uint8).reshape(-1, CHUNK)
    for number, place in enumerate(stored.store_spec.block_ids):
        rows[place] = number + 1
    first.complete_store(keys, context)
    step(first, ["writes"])
    wait_for(lambda: step(first) or not first.has_pending_work())
    first.on_request_finished(context)

    second, primary = managed(spec, tier, f"{tmp_path.name}-b")
    context = ReqContext("reads")
    second.on_new_request(context)

    def found():
        answers = [second.lookup(key, context) for key in keys]
        step(second)
        return answers == [LookupResult.HIT] * 3

    wait_for(found)
    places = second.prepare_load(keys, context).block_ids
    rows = np.frombuffer(primary.get_kv_memoryview().cast("B"), np.uint8).reshape(-1, CHUNK)
    assert [set(rows[place].tolist()) for place in places] == [{1}, {2}, {3}]
    second.complete_load(keys, context)
    second.on_request_finished(context)
    del rows
    for manager in (first, second):
        manager.shutdown()
