"""KvtierdL2Adapter: LMCache keeps its second level in kvtierd.

    lmcache server … --l2-adapter '{"type": "plugin", "module_path": "kvtierd.connectors.lmcache",
        "class_name": "KvtierdL2Adapter"}'

Stores, lookups and loads run in threads beside LMCache's controllers, and each tells its end by a descriptor. Objects
go through the daemon's shared memory: written in place, and copied out with their checksums compared. Without a daemon
lookups find nothing and stores fail, each at once; when it comes back it is used again.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

try:
    from lmcache.lmcache_native import Bitmap
    from lmcache.logging import init_logger
    from lmcache.v1.distributed.api import KeyEntry, KeyListPage
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
    from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
    from lmcache.v1.platform import create_event_notifier
except ImportError as error:
    raise ImportError("kvtierd.connectors.lmcache wants LMCache 0.5.6 or later in this environment") from error

from kvtierd.connectors.lmcache_names import Names
from kvtierd.connectors.lmcache_objects import CachedObjects
from kvtierd.connectors.lmcache_residents import Resident
from kvtierd.connectors.lmcache_settings import Settings
from kvtierd.connectors.lmcache_tasks import Tasks
from kvtierd.connectors.objects import Flags, Objects
from kvtierd.connectors.settings import read_settings
from kvtierd.connectors.watch import Watch
from kvtierd.core.checksum import Bytes
from kvtierd.protocol.client import Client

__all__ = ["KvtierdL2Adapter", "KvtierdL2AdapterConfig"]

_log = init_logger("lmcache.kvtierd")

LOADERS = 2
"""Loads at a time: one copies while another waits for the daemon."""

SWEEP = 1024
"""Objects that are checked with each look at the usage."""


class KvtierdL2AdapterConfig(L2AdapterConfigBase):
    """The plugin's `adapter_params` (see `Settings`)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> KvtierdL2AdapterConfig:
        """Check the parameters. Raises ValueError naming what is wrong, and the nearest key."""
        return cls(read_settings(Settings, d, "adapter_params"))

    @classmethod
    def help(cls) -> str:
        """For LMCache's command line."""
        return Settings.__doc__ or ""


class KvtierdL2Adapter(L2AdapterInterface):
    """LMCache's L2 adapter over one client of the daemon. Thread-safe.

    Its usage is what this process stored or found and is still there; it has no capacity of its own, since the daemon
    evicts by itself.
    """

    def __init__(self, config: KvtierdL2AdapterConfig, l1_memory_desc: Any = None) -> None:  # noqa: ARG002 - LMCache's
        super().__init__()
        settings = config.settings
        self._client = Client(settings.endpoint or None, timeout_s=settings.lookup_timeout_ms / 1e3, name="lmcache")
        self._objects = Objects(
            self._client,
            load_timeout_s=settings.load_timeout_ms / 1e3,
            store_timeout_s=settings.store_timeout_ms / 1e3,
        )
        names = Names(settings.tenant_salt)
        self._cached = CachedObjects(self._client, self._objects, names, self, settings.lookup_timeout_ms / 1e3)
        self._sweeping = False
        numbers = itertools.count(1)
        self._notifiers = [create_event_notifier() for _ in range(3)]
        store, lookup, load = self._notifiers
        self._stores: Tasks[L2StoreResult] = Tasks("store", numbers, store.notify)
        self._lookups: Tasks[Bitmap] = Tasks("lookup", numbers, lookup.notify)
        self._loads: Tasks[Bitmap] = Tasks("load", numbers, load.notify, threads=LOADERS)
        self._watch = Watch(self._client, _log, logging.WARNING, "nothing is found or stored meanwhile")
        state = "not there yet" if self._watch.away else "connected"
        _log.info("kvtierd: second level at %s: %s", self._client.endpoint, state)

    # Descriptors

    def get_store_event_fd(self) -> int:
        """Readable when a store has ended."""
        return int(self._notifiers[0].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when a lookup has ended."""
        return int(self._notifiers[1].fileno())

    def get_load_event_fd(self) -> int:
        """Readable when a load has ended."""
        return int(self._notifiers[2].fileno())

    # Stores

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store objects; the task fails where one of them was not stored."""
        _check_lengths(keys, objects)

        def store() -> L2StoreResult:
            return L2StoreResult(*self._cached.store(keys, _buffers(objects)))

        return self._stores.submit(store, lambda: L2StoreResult(success=False, bytes_transferred=0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Results of stores that have ended since the last call."""
        return self._stores.take_all()

    # Lookups

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        """Find objects, and keep those that are found until they are unlocked."""
        sizes = {group: _nbytes(desc) for group, desc in group_layout_descs.items()}
        return self._lookups.submit(lambda: _bitmap(self._cached.find(keys, sizes)), lambda: Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """What a lookup found, once."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Take back one lock of each; done in the order of lookups and unlocks."""
        self._lookups.post(lambda: self._cached.unlock(keys))

    # Loads

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Copy objects into the caller's memory."""
        _check_lengths(keys, objects)

        def load() -> Bitmap:
            loaded = self._cached.load(keys, _buffers(objects))
            if loaded.any():
                self._notify_keys_accessed([keys[i] for i in np.flatnonzero(loaded)])
            return _bitmap(loaded)

        return self._loads.submit(load, lambda: Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Which objects of a load arrived, once."""
        return self._loads.take(task_id)

    # Accounts

    def delete(self, keys: list[Any]) -> None:
        """Forget objects in every tier."""
        self._cached.delete(keys)

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """Objects that this process stored or found and that are still there, page by page.

        Raises ValueError for a page without entries, and for a cursor that is none of ours.
        """
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}; at least 1 is wanted")
        if cursor is not None and not cursor.isdecimal():
            raise ValueError(f"cursor {cursor!r} is none that this adapter gave")
        page, after = self._cached.residents.page(int(cursor or 0), page_size, model_name)
        self._cached.check(page)
        page = self._cached.residents.known([item.name for item in page])
        entries = tuple(KeyEntry(item.key.to_encoded_object_key(), item.nbytes) for item in page)
        return KeyListPage(entries, None if after is None else str(after))

    def came(self, items: Sequence[Resident]) -> None:
        """See `lmcache_objects.Listener`."""
        self._notify_keys_stored([item.key for item in items], [item.nbytes for item in items])

    def went(self, items: Sequence[Resident]) -> None:
        """See `lmcache_objects.Listener`."""
        self._notify_keys_deleted([item.key for item in items], [item.nbytes for item in items])

    def get_usage(self) -> AdapterUsage:
        """Bytes of these objects, by salt. What the daemon has evicted is noticed by and by, some with each call."""
        if not self._sweeping:
            self._sweeping = True
            self._lookups.post(self._sweep)
        return super().get_usage()

    def _sweep(self) -> None:
        try:
            self._cached.sweep(SWEEP)
        finally:
            self._sweeping = False

    def report_status(self) -> dict[str, Any]:
        """For LMCache's status page."""
        return {
            "is_healthy": not self._watch.away,
            "type": "KvtierdL2Adapter",
            "endpoint": self._client.endpoint,
            "known_object_count": len(self._cached.residents),
            "locked_key_count": self._cached.locked,
        }

    def close(self) -> None:
        """End the threads and the client; its pins end with it."""
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()
        self._objects.close()
        self._watch.close()
        self._client.close()
        for notifier in self._notifiers:
            notifier.close()


def _buffers(objects: Sequence[Any]) -> list[Bytes]:
    """The bytes of LMCache's memory objects, in place: [nbytes] uint8."""
    return [np.frombuffer(item.byte_array, np.uint8) for item in objects]


def _bitmap(flags: Flags) -> Bitmap:
    bitmap = Bitmap(flags.size)
    for i in np.flatnonzero(flags).tolist():
        bitmap.set(i)
    return bitmap


def _nbytes(desc: Any) -> int:
    """Bytes of an object with this layout; 0 where it does not say."""
    return sum(shape.numel() * dtype.itemsize for shape, dtype in zip(desc.shapes, desc.dtypes, strict=True))


def _check_lengths(keys: Sequence[Any], objects: Sequence[Any]) -> None:
    if len(keys) != len(objects):
        raise ValueError(f"{len(keys)} keys came with {len(objects)} objects")
