"""KvtierdHiCache against SGLang's abstract class, made by SGLang's factory, with a real daemon."""

from __future__ import annotations

import inspect
import itertools
import time
from types import SimpleNamespace

import pytest

PAGES = 8
_models = itertools.count()


def hashes(count=PAGES, of=""):
    return [f"{of}{i:064x}" for i in range(count)]


@pytest.fixture
def model():
    return f"model-{next(_models)}"


def indices(pages, size=16):
    import torch

    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


def test_every_call_of_the_interface_takes_what_sglang_passes():
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    from kvtierd.connectors.sglang import KvtierdHiCache

    assert not KvtierdHiCache.__abstractmethods__
    for name, theirs in inspect.getmembers(HiCacheStorage, inspect.isfunction):
        if name.startswith("_") or name in ("on_host_pools_registered", "get_stats"):
            continue
        ours = inspect.signature(getattr(KvtierdHiCache, name)).parameters
        assert list(ours) == list(inspect.signature(theirs).parameters), name
        assert name in vars(KvtierdHiCache), name


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_pages_come_back_wherever_the_pool_puts_them(backend, pools, model, layout):
    source, target = pools.Host(layout, seed=1), pools.Host(layout)
    out = backend(source, model_name=model)
    assert out.batch_exists(hashes()) == 0
    assert out.batch_set_v1(hashes(), indices(range(PAGES))) == [True] * PAGES
    assert out.batch_exists(hashes()) == PAGES
    back = backend(target, model_name=model)
    there = list(reversed(range(PAGES)))
    assert back.batch_get_v1(hashes(), indices(there)) == [True] * PAGES
    assert all((target.page(there[i]) == source.page(i)).all() for i in range(PAGES))


def test_pages_that_are_missing_are_told_one_by_one(backend, pools, model):
    source, target = pools.Host(seed=2), pools.Host()
    storage = backend(source, model_name=model)
    keys = hashes()
    storage.batch_set_v1([keys[i] for i in (0, 1, 4)], indices((0, 1, 4)))
    assert storage.batch_exists(keys) == 2
    assert storage.exists(keys[4])
    assert not storage.exists(keys[3])
    storage = backend(target, model_name=model)
    assert storage.batch_get_v1(keys, indices(range(PAGES))) == [i in (0, 1, 4) for i in range(PAGES)]
    assert (target.page(4) == source.page(4)).all()
    assert not target.page(3).any()


def test_a_later_part_of_a_prefix_is_stored_behind_what_sglang_says_is_before_it(backend, pools, model):
    storage = backend(pools.Host(seed=3), model_name=model)
    keys = hashes()
    before = SimpleNamespace(prefix_keys=keys[:4], extra_info=None)
    assert all(storage.batch_set_v1(keys[:4], indices(range(4))))
    assert all(storage.batch_set_v1(keys[4:], indices(range(4, 8)), before))
    assert storage.batch_exists(keys, before) == PAGES


@pytest.mark.parametrize(
    "change",
    [
        {"model_name": "other"},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
        {"kvtierd": {"revision": "2"}},
        {"kvtierd": {"tenant_salt": "else"}},
        {"layout": "page_first"},
        {"dtype": "float16"},
        {"v1": 0},
    ],
)
def test_case_07_whatever_shapes_pages_keeps_them_apart(backend, pools, change):
    storage = backend(pools.Host(seed=4), model_name="apart")
    storage.batch_set_v1(hashes(), indices(range(PAGES)))
    change = dict(change)
    pool = pools.Host(change.pop("layout", "layer_first"), dtype=change.pop("dtype", "bfloat16"))
    assert backend(pool, **{"model_name": "apart", **change}).batch_exists(hashes()) == 0


def test_latent_kv_is_shared_by_all_ranks_and_recurrent_states_are_not(backend, pools, model):
    import torch
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    first, second = (
        backend(pools.Host(seed=5), model_name=model, is_mla_model=True, tp_rank=rank, tp_size=2) for rank in (0, 1)
    )
    for storage in (first, second):
        storage.register_mem_host_pool_v2(pools.State(seed=6), PoolName.MAMBA)
    first.batch_set_v1(hashes(), indices(range(PAGES)))
    first.batch_set_v2([PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([3]), keys=hashes()[-1:])])
    assert second.batch_exists(hashes()) == PAGES
    states = [PoolTransfer(PoolName.MAMBA, keys=hashes()[-1:], hit_policy="trailing_pages")]
    assert first.batch_exists_v2(hashes(), states).kv_hit_pages == PAGES
    assert second.batch_exists_v2(hashes(), states).kv_hit_pages == 0


def test_case_25_pools_of_one_model_have_pages_of_their_own_and_agree_on_a_prefix(backend, pools, model):
    import torch
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    kv, states, target = pools.Host(seed=7), pools.State(seed=8), pools.State()
    storage = backend(kv, model_name=model)
    storage.register_mem_host_pool_v2(kv, PoolName.KV)
    storage.register_mem_host_pool_v2(states, PoolName.MAMBA)
    keys = hashes()
    stored = storage.batch_set_v2(
        [
            PoolTransfer(PoolName.KV, host_indices=indices(range(6)), keys=keys[:6]),
            PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([9, 4]), keys=[keys[1], keys[3]]),
        ]
    )
    assert stored == {PoolName.KV: [True] * 6, PoolName.MAMBA: [True] * 2}
    asked = [PoolTransfer(PoolName.MAMBA, keys=keys[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    result = storage.batch_exists_v2(keys, asked)
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (4, [2, 4])
    assert result.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.MAMBA: 4}
    every = [PoolTransfer(PoolName.MAMBA, keys=keys)]
    assert storage.batch_exists_v2(keys, every).kv_hit_pages == 0
    assert storage.batch_exists_v2(keys).kv_hit_pages == 6
    storage.register_mem_host_pool_v2(target, PoolName.MAMBA)
    loaded = storage.batch_get_v2(
        [PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([0, 1]), keys=[keys[3], keys[5]])]
    )
    assert loaded == {PoolName.MAMBA: [True, False]}
    assert all((there[0] == here[4]).all() for there, here in zip(target.parts, states.parts, strict=True))
    with pytest.raises(ValueError, match="BLOCK_GROUPS"):
        storage.batch_exists_v2(keys, [PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.BLOCK_GROUPS)])


def test_an_anchor_without_bytes_leaves_the_answer_to_the_others(backend, pools, model):
    import torch
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    class Anchor:
        page_size = 16

        def get_page_buffer_meta(self, indices):  # noqa: ARG002 - as SGLang's
            return None

    storage = backend(Anchor(), model_name=model)
    storage.register_mem_host_pool_v2(pools.State(seed=9), PoolName.SWA)
    keys = hashes()
    storage.batch_set_v2([PoolTransfer(PoolName.SWA, host_indices=torch.arange(3), keys=keys[:3])])
    every = [PoolTransfer(PoolName.SWA, keys=keys, hit_policy=PoolHitPolicy.ALL_PAGES)]
    assert storage.batch_exists_v2(keys, every).kv_hit_pages == 3


def test_flat_pages_serve_sglang_without_interface_v1(backend, pools, model):
    pool = pools.Host(seed=10)
    storage = backend(pool, model_name=model, v1=0)
    pages = [pool.page(i).contiguous().flatten() for i in range(PAGES)]
    assert storage.batch_set(hashes(), pages)
    assert storage.batch_exists(hashes()) == PAGES
    room = [pool.get_dummy_flat_data_page() for _ in range(PAGES + 1)]
    got = storage.batch_get(hashes(PAGES + 1), room)
    assert got[-1] is None
    assert all((a == b).all() for a, b in zip(got[:-1], pages, strict=True))
    assert storage.set("single", pages[0])
    assert (storage.get("single", pool.get_dummy_flat_data_page()) == pages[0]).all()
    with pytest.raises(ValueError, match="a page of 6 bytes"):
        storage.set("other", pages[0][:3])


def test_clearing_forgets_this_model_and_no_other(backend, pools, model):
    mine, other = (backend(pools.Host(seed=11), model_name=name) for name in (model, f"{model}-other"))
    for storage in (mine, other):
        storage.batch_set_v1(hashes(), indices(range(PAGES)))
    mine.clear()
    assert (mine.batch_exists(hashes()), other.batch_exists(hashes())) == (0, PAGES)


def test_numbers_that_do_not_fit_are_named(backend, pools, model):
    storage = backend(pools.Host(), model_name=model)
    with pytest.raises(ValueError, match="2 pages of 16 tokens came with 16 indices"):
        storage.batch_get_v1(hashes(2), indices(range(1)))
    with pytest.raises(ValueError, match="did you mean endpoint"):
        backend(pools.Host(), kvtierd={"endpont": ""})


def test_without_a_daemon_everything_ends_at_once(backend, pools, tmp_path, model):
    storage = backend(pools.Host(), endpoint=f"ipc://{tmp_path}/no.sock", model_name=model)
    begin = time.monotonic()
    assert storage.batch_exists(hashes()) == 0
    assert storage.batch_set_v1(hashes(), indices(range(PAGES))) == [False] * PAGES
    assert storage.batch_get_v1(hashes(), indices(range(PAGES))) == [False] * PAGES
    assert time.monotonic() - begin < 20, "no deadline was waited for"
