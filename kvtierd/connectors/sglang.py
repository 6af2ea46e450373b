"""KvtierdHiCache: SGLang's hierarchical cache keeps its third level in kvtierd.

    python -m sglang.launch_server … --enable-hierarchical-cache --hicache-storage-backend dynamic
        --hicache-storage-backend-extra-config '{"backend_name": "kvtierd", "interface_v1": 1,
            "module_path": "kvtierd.connectors.sglang", "class_name": "KvtierdHiCache"}'

A page of a pool is one object: copied between SGLang's host pool, where its pieces lie, and the daemon's shared memory,
without a copy between. SGLang calls from its own storage threads, so that each call may take its deadline. Without a
daemon lookups find nothing and stores fail, each at once; when it comes back it is used again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

try:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult
except ImportError as error:
    raise ImportError("kvtierd.connectors.sglang wants SGLang 0.5.23 or later in this environment") from error

from kvtierd.connectors.objects import DROPPED, Flags, Objects
from kvtierd.connectors.pieces import Pieces, memory_at
from kvtierd.connectors.settings import read_settings
from kvtierd.connectors.sglang_hits import ends_with_all_pages, ends_with_trailing_pages, longest
from kvtierd.connectors.sglang_pools import Pool
from kvtierd.connectors.sglang_settings import Settings
from kvtierd.connectors.watch import Watch
from kvtierd.core.errors import KvtierdError
from kvtierd.protocol.client import Client

__all__ = ["KvtierdHiCache"]

_log = logging.getLogger("sglang.kvtierd")


class KvtierdHiCache(HiCacheStorage):
    """SGLang's storage backend over one client of the daemon. Thread-safe.

    Raises ValueError, naming what is wrong, for settings that do not exist and for pools whose pages have a size that
    cannot be stored.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:  # noqa: ARG002 - SGLang's factory passes it
        extra = dict(storage_config.extra_config or {})
        settings = read_settings(Settings, extra.get("kvtierd", {}), "extra_config's kvtierd")
        self._config = storage_config
        self._settings = settings
        self._flat = not extra.get("interface_v1", 0)
        name = f"sglang:{storage_config.pp_rank}.{storage_config.tp_rank}"
        self._client = Client(settings.endpoint or None, timeout_s=settings.lookup_timeout_ms / 1e3, name=name)
        self._objects = Objects(
            self._client,
            load_timeout_s=settings.load_timeout_ms / 1e3,
            store_timeout_s=settings.store_timeout_ms / 1e3,
        )
        self._pools: dict[str, Pool] = {}
        self._watch = Watch(self._client, _log, logging.WARNING, "nothing is found or stored meanwhile")
        state = "not there yet" if self._watch.away else "connected"
        _log.info("kvtierd: third level at %s: %s", self._client.endpoint, state)

    # Pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool of the KV."""
        super().register_mem_pool_host(mem_pool_host)
        self._pools[PoolName.KV.value] = self._made(PoolName.KV.value, mem_pool_host, flat=self._flat)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take another pool; pages of such are always copied in place."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(getattr(host_pool_name, "value", host_pool_name))
        if name != PoolName.KV.value or name not in self._pools or self._flat:
            self._pools[name] = self._made(name, host_pool)

    def _made(self, name: str, pool: Any, *, flat: bool = False) -> Pool:
        settings = self._settings
        return Pool(self._config, name, pool, revision=settings.revision, salt=settings.tenant_salt, flat=flat)

    # Lookups

    def exists(self, key: str) -> bool:
        """Whether a page of KV is there."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:  # noqa: ARG002 - SGLang's signature
        """How many leading pages of KV are there."""
        return longest(ends_with_all_pages(self._there(PoolName.KV.value, keys)))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[Any] | None = None,
        extra_info: Any = None,  # noqa: ARG002 - SGLang's signature
    ) -> PoolTransferResult:
        """How many leading pages can be used, where each pool has what it needs of them."""
        ends = ends_with_all_pages(self._there(PoolName.KV.value, keys))
        found = longest(ends)
        hits: dict[str, int] = {PoolName.KV: found} if found else {}
        for transfer in pool_transfers or ():
            if not ends.any():
                break
            there = self._there(_name(transfer), keys[:found])
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                mine = ends_with_all_pages(there)
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                mine = ends_with_trailing_pages(there, max(1, len(transfer.keys or ())))
            else:
                raise ValueError(f"pool {_name(transfer)} wants {transfer.hit_policy}, which is not supported")
            if pages := longest(mine):
                hits[transfer.name] = pages
            ends = ends[:found] & mine
        return PoolTransferResult(longest(ends), hits, (np.flatnonzero(ends) + 1).tolist())

    def _there(self, name: str, keys: Sequence[str]) -> Flags:
        pool = self._pools[name]
        if pool.handle is None or not keys:
            return np.ones(len(keys), np.bool_)
        masks = self._objects.present(pool.handle, pool.keys(keys))
        return np.asarray(masks > 0)

    # Pages in place

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        """Load pages of KV to where the host pool has them; which arrived."""
        return self._load(PoolName.KV.value, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of KV; which are stored now."""
        return self._store(PoolName.KV.value, keys, host_indices, extra_info)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ARG002
        """Load pages of several pools."""
        return {each.name: self._load(_name(each), each.keys or [], each.host_indices) for each in transfers}

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of several pools."""
        return {
            each.name: self._store(_name(each), each.keys or [], each.host_indices, extra_info) for each in transfers
        }

    def _load(self, name: str, keys: Sequence[str], indices: Any) -> list[bool]:
        pool = self._pools[name]
        if pool.handle is None or not keys:
            return [True] * len(keys)
        return self._loaded(pool, keys, pool.pages(len(keys), indices))

    def _store(self, name: str, keys: Sequence[str], indices: Any, extra_info: Any) -> list[bool]:
        pool = self._pools[name]
        if pool.handle is None or not keys:
            return [True] * len(keys)
        return self._stored(pool, keys, pool.pages(len(keys), indices), _prefix(extra_info))

    def _loaded(self, pool: Pool, keys: Sequence[str], pages: Sequence[Pieces]) -> list[bool]:
        assert pool.handle is not None, "a pool without bytes is answered before"
        try:
            return [bool(flag) for flag in self._objects.load(pool.handle, pool.keys(keys), pages)]
        except KvtierdError as error:
            _log.warning("kvtierd: pages were not loaded: %s", error)
            return [False] * len(keys)

    def _stored(
        self, pool: Pool, keys: Sequence[str], pages: Sequence[Pieces], prefix: Sequence[str] = ()
    ) -> list[bool]:
        assert pool.handle is not None, "a pool without bytes is answered before"
        parent = pool.keys(prefix[-1:]).tobytes()
        try:
            outcomes = self._objects.store(pool.handle, pool.keys(keys), pages, parent)
        except KvtierdError as error:
            _log.warning("kvtierd: pages were not stored: %s", error)
            return [False] * len(keys)
        return [bool(flag) for flag in outcomes != DROPPED]

    # Flat pages, for SGLang without `interface_v1`

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Load a page into a flat tensor; None where it is not there."""
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:  # noqa: ARG002
        """Load pages into flat tensors on the CPU; None for each that is not there."""
        pool = self._flat_pool()
        loaded = self._loaded(pool, keys, [_flat_page(item, pool.nbytes) for item in target_locations])
        return [item if flag else None for item, flag in zip(target_locations, loaded, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page from a flat tensor."""
        return self.batch_set([key], [value], target_location, target_sizes)

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,  # noqa: ARG002 - SGLang's signature
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        """Store pages from flat tensors on the CPU; whether all are stored."""
        pool = self._flat_pool()
        held = [item.contiguous() for item in values]
        return all(self._stored(pool, keys, [_flat_page(item, pool.nbytes) for item in held]))

    def _flat_pool(self) -> Pool:
        if not self._flat:
            raise ValueError("with interface_v1 pages are copied in place: use batch_get_v1 and batch_set_v1")
        return self._pools[PoolName.KV.value]

    # Life

    def clear(self) -> None:
        """Forget all pages of this model, rank and form, in every tier."""
        for pool in self._pools.values():
            if pool.handle is not None:
                self._client.purge(pool.handle)

    def close(self) -> None:
        """End the threads and the client."""
        self._watch.close()
        self._objects.close()
        self._client.close()


def _name(transfer: Any) -> str:
    return str(getattr(transfer.name, "value", transfer.name))


def _prefix(extra_info: Any) -> Sequence[str]:
    return (getattr(extra_info, "prefix_keys", None) or ()) if extra_info is not None else ()


def _flat_page(tensor: Any, nbytes: int) -> Pieces:
    size = tensor.numel() * tensor.element_size()
    if size != nbytes or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"a page of {size} bytes on {tensor.device}; {nbytes} contiguous bytes on the CPU are wanted")
    return [memory_at(tensor.data_ptr(), size)]
