"""The synchronous client: what an engine calls (protocol/SPEC.md §9 describes its promises)."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from kvtierd.core.checksum import Bytes, CopyParts
from kvtierd.core.keys import Keys, as_keys
from kvtierd.core.namespace import Namespace
from kvtierd.protocol.ahead import Leases, Reservations
from kvtierd.protocol.asking import Asking
from kvtierd.protocol.attention import SyncAttention
from kvtierd.protocol.connection import Connection
from kvtierd.protocol.copying import Copier, default_threads
from kvtierd.protocol.curve import CurveKeys
from kvtierd.protocol.endpoint import default_endpoint
from kvtierd.protocol.grants import acquire_request, reserve_request
from kvtierd.protocol.holds import Lease, Reservation, check_out
from kvtierd.protocol.messages import AnyRequest, Delete, Pin, Prefetch, Reshape, Tier, Unpin
from kvtierd.protocol.part_lease import Part, fetch_part
from kvtierd.protocol.queries import Queries
from kvtierd.protocol.results import Fetched, Hit, NamespaceHandle, Stored
from kvtierd.protocol.slots import SlotPlans
from kvtierd.protocol.transfers import Transfers, as_blocks
from kvtierd.protocol.waiting import MAX_UNANSWERED, Driver

__all__ = ["MAX_UNANSWERED", "TIMEOUT_S", "TRANSFER_TIMEOUT_S", "Client"]

TIMEOUT_S = 0.1
"""For operations on metadata: an engine's scheduler waits for these."""
TRANSFER_TIMEOUT_S = 2.0
"""For operations that may move data."""
BATCH = 32
"""Blocks that `leases` and `reservations` take at a time."""


class Client(SyncAttention):
    """A connection to kvtierd.

    `endpoint` is `ipc://PATH`, or `tcp://HOST:PORT` with the keys `curve` or of the environment; by default
    $KVTIERD_ENDPOINT, else the service's default tenant. No call outlives its deadline: `timeout_s` for metadata,
    `transfer_timeout_s` for data. Without a daemon lookups and fetches find nothing, stores are dropped, and `counters`
    count both; `ping`, `stats`, `flush` and `purge` raise Unavailable. RequestError and ValueError are the caller's
    mistakes. `arena=False` sends blocks in frames. `copies` moves blocks: the plain way in NumPy by default;
    `kvtierd.index.streaming.copy_streaming` is compiled and faster, and imports Numba.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        transfer_timeout_s: float = TRANSFER_TIMEOUT_S,
        copy_threads: int | None = None,
        copies: CopyParts | None = None,
        arena: bool = True,
        name: str = "",
        curve: CurveKeys | None = None,
    ) -> None:
        self.endpoint = endpoint or default_endpoint()
        self.timeout_s = timeout_s
        self.transfer_timeout_s = transfer_timeout_s
        self._connection = Connection(self.endpoint, name or f"python:{os.getpid()}", curve)
        self._copier = Copier(copy_threads or default_threads(), copies)
        self._asking = asking = Asking(self._connection)
        self._queries = Queries(asking)
        self._slots = SlotPlans(asking, self._copier, use_arena=arena)
        self._transfers = Transfers(asking, self._queries, self._slots, self._copier)
        self._driver = Driver(self._connection, (self._slots.abandon, self._copier.abandon))

    @property
    def counters(self) -> Counter[str]:
        """What no result or exception tells: misses and drops without a daemon, sessions, late replies."""
        return self._connection.counters

    @property
    def epoch(self) -> int:
        """The life of the daemon that said hello last; 0 before the first."""
        return self._connection.epoch

    # Metadata

    def register(self, namespace: Namespace, *, allow_loss: bool = False, ttl_s: int = 0) -> NamespaceHandle:
        """Name a namespace. Without a daemon the handle is registered with its first use.

        `allow_loss` permits FP8 for its cold blocks. Those that are neither stored nor read for `ttl_s` seconds are
        forgotten (0: as the daemon is set). Raises RequestError when the daemon refuses the namespace.
        """
        handle = NamespaceHandle(namespace, allow_loss=allow_loss, ttl_s=ttl_s)
        return self._driver.run(self._queries.register(handle, self._deadline_ns(None)))

    def lookup(
        self,
        namespace: NamespaceHandle,
        keys: Keys,
        *,
        prefill_tokens_per_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Hit:
        """How long is the stored prefix of `keys` ([n, 32] uint8)?

        With `prefill_tokens_per_s`, how fast the caller computes KV, the hit says how much of it is worth loading.
        """
        plan = self._queries.lookup((namespace,), (keys,), self._deadline_ns(timeout_s), prefill_tokens_per_s)
        return self._driver.run(plan)

    def lookup_group(
        self,
        namespaces: Sequence[NamespaceHandle],
        keys: Sequence[Keys],
        *,
        prefill_tokens_per_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Hit:
        """The common prefix over several namespaces (groups or ranks), one array of keys each, of equal lengths."""
        plan = self._queries.lookup(namespaces, keys, self._deadline_ns(timeout_s), prefill_tokens_per_s)
        return self._driver.run(plan)

    def lookup_many(
        self, namespace: NamespaceHandle, keys: Sequence[Keys], *, timeout_s: float | None = None
    ) -> list[Hit]:
        """Look up many sequences at the cost of one round trip."""
        return self._driver.run(self._queries.lookup_many(namespace, keys, self._deadline_ns(timeout_s)))

    def prefetch(
        self,
        namespace: NamespaceHandle,
        keys: Keys,
        *,
        tier: Tier = "host",
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """Bring the leading run towards a tier; how many blocks. `wait` returns when the moves are done."""
        deadline_ns = self._transfer_ns(timeout_s) if wait else self._deadline_ns(timeout_s)
        return self._driver.run(
            self._queries.count(
                namespace,
                lambda number: Prefetch(id=0, namespace=number, tier=tier, wait=wait),
                keys,
                deadline_ns,
            )
        )

    def pin(self, namespace: NamespaceHandle, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Keep blocks until `unpin` or `close`; how many are pinned."""
        return self._count(namespace, lambda number: Pin(id=0, namespace=number), keys, timeout_s)

    def unpin(self, namespace: NamespaceHandle, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Take back pins of this client; how many there were."""
        return self._count(namespace, lambda number: Unpin(id=0, namespace=number), keys, timeout_s)

    def delete(self, namespace: NamespaceHandle, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Forget blocks in every tier; how many there were."""
        return self._count(namespace, lambda number: Delete(id=0, namespace=number), keys, timeout_s)

    def purge(
        self, namespace: NamespaceHandle | None = None, *, tiers: Sequence[Tier] = (), timeout_s: float | None = None
    ) -> int:
        """Forget a namespace, or all of the tenant's; with `tiers` only copies there that are not the last one."""
        return self._driver.run(self._queries.purge(namespace, tiers, self._transfer_ns(timeout_s)))

    def flush(self, *, timeout_s: float | None = None) -> None:
        """Return when every block committed before is on stable storage, or was dropped and counted."""
        self._driver.run(self._queries.flush(self._transfer_ns(timeout_s)))

    def stats(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Counters and gauges of the daemon by name; units are in the names."""
        return self._driver.run(self._queries.stats(self._deadline_ns(timeout_s)))

    def ping(self, *, timeout_s: float | None = None) -> int:
        """Round trip to the daemon in nanoseconds."""
        start_ns = time.monotonic_ns()
        self._driver.run(self._queries.ping(self._deadline_ns(timeout_s)))
        return time.monotonic_ns() - start_ns

    # Data

    def reserve(self, namespace: NamespaceHandle, keys: Keys, *, timeout_s: float | None = None) -> Reservation:
        """Slots in the arena to write blocks into; where there is no arena every status is SLOT_BUSY."""
        grant = self._driver.run(self._slots.reserve(namespace, keys, reserve_request, self._deadline_ns(timeout_s)))
        return Reservation(self._driver, self._slots, namespace, grant, self.transfer_timeout_s)

    def acquire(
        self,
        namespace: NamespaceHandle,
        keys: Keys,
        *,
        ttl_s: float | None = None,
        verify: bool = False,
        timeout_s: float | None = None,
    ) -> Lease:
        """Lease the leading run of present blocks in the arena; `verify` has the daemon hash them first."""
        ttl_ms = 0 if ttl_s is None else max(1, int(ttl_s * 1000))
        deadline_ns = self._transfer_ns(timeout_s)
        plan = self._slots.acquire(namespace, keys, acquire_request(ttl_ms=ttl_ms, verify=verify), deadline_ns)
        return Lease(self._driver, self._slots, namespace, self._driver.run(plan))

    def fetch_part(
        self,
        namespace: NamespaceHandle,
        keys: Keys,
        begin: int,
        end: int,
        *,
        verify: bool = True,
        timeout_s: float | None = None,
    ) -> Part:
        """Copy tokens begin..end-1 of the leading run, counted from the first key, through the arena.

        Nothing where there is no arena. The daemon counts which parts of blocks are read so, and keeps those apart.
        Raises RequestError for tokens outside the keys, and for blocks that have no parts.
        """
        plan = fetch_part(
            self._slots, namespace, keys, begin, end, verify=verify, deadline_ns=self._transfer_ns(timeout_s)
        )
        return self._driver.run(plan)

    def reshape(
        self, namespace: NamespaceHandle, keys: Keys, parts: Sequence[int], *, timeout_s: float | None = None
    ) -> int:
        """Have blocks lie in host in extents of `parts` tokens (64 to 512 in steps of 64), a part of one block each or
        several whole ones; how many blocks do then, all or none. Keys, and what is read under them, stay the same."""
        deadline_ns = self._transfer_ns(timeout_s)

        def build(number: int) -> AnyRequest:
            return Reshape(id=0, namespace=number, parts=list(parts))

        return self._driver.run(self._queries.count(namespace, build, keys, deadline_ns))

    def leases(
        self,
        namespace: NamespaceHandle,
        keys: Keys,
        *,
        batch: int = BATCH,
        parent: bytes = b"",
        ttl_s: float | None = None,
        verify: bool = False,
        timeout_s: float | None = None,
    ) -> Iterator[Lease]:
        """Lease the leading run, `batch` blocks at a time; the next ones are asked for while the caller works on these.

        Each lease ends when the next one is taken, and the last with the iterator, which ends with the run. `parent` is
        the key before the first, where that is not the beginning of a prefix. Deadlines hold for each step. Raises
        ValueError for a batch of less than one.
        """
        ttl_ms = 0 if ttl_s is None else max(1, int(ttl_s * 1000))
        build = acquire_request(ttl_ms=ttl_ms, verify=verify)
        ahead = Leases(self._slots, namespace, as_keys(keys), batch, build, parent)

        def steps() -> Iterator[Lease]:
            try:
                leased = self._driver.run(ahead.take(self._transfer_ns(timeout_s)))
                while leased is not None:
                    with Lease(self._driver, self._slots, namespace, leased) as lease:
                        yield lease
                        leased = self._driver.run(ahead.turn(leased, self._transfer_ns(timeout_s)))
            finally:
                self._driver.run(ahead.drop())

        return steps()

    def reservations(
        self,
        namespace: NamespaceHandle,
        keys: Keys,
        *,
        batch: int = BATCH,
        parent: bytes = b"",
        timeout_s: float | None = None,
    ) -> Iterator[Reservation]:
        """Reserve slots for all keys, `batch` at a time; the next ones are asked for while the caller fills these.

        What is not committed when the next one is taken, or the iterator ends, is given back. `parent` is the key
        before the first, where that is not the beginning of a prefix. Deadlines hold for each step. Raises ValueError
        for a batch of less than one.
        """
        ahead = Reservations(self._slots, namespace, as_keys(keys), batch, parent)

        def steps() -> Iterator[Reservation]:
            try:
                while (grant := self._driver.run(ahead.take(self._deadline_ns(timeout_s)))) is not None:
                    with Reservation(
                        self._driver, self._slots, namespace, grant, self.transfer_timeout_s, ahead.more
                    ) as reservation:
                        yield reservation
            finally:
                self._driver.run(ahead.drop())

        return steps()

    def store(
        self,
        namespace: NamespaceHandle,
        keys: Keys,
        blocks: Bytes | Sequence[Bytes],
        *,
        timeout_s: float | None = None,
    ) -> Stored:
        """Store packed blocks: [n, block_bytes] uint8, or n arrays of block_bytes each."""
        flat = as_blocks(blocks, len(keys), namespace.geometry.block_bytes)
        return self._driver.run(self._transfers.store(namespace, keys, flat, self._transfer_ns(timeout_s)))

    def fetch(
        self,
        namespace: NamespaceHandle,
        keys: Keys,
        out: Bytes | None = None,
        *,
        verify: bool = True,
        timeout_s: float | None = None,
    ) -> Fetched:
        """Fetch the leading run of present blocks into `out` ([n, block_bytes] uint8) or new memory."""
        check_out(out, len(keys), namespace.geometry.block_bytes)
        deadline_ns = self._transfer_ns(timeout_s)
        return self._driver.run(self._transfers.fetch(namespace, keys, out, verify=verify, deadline_ns=deadline_ns))

    # Life

    def close(self) -> None:
        """Hang up; leases, pins and unfinished reservations of this client end. A second call does nothing."""
        if self._driver.close():
            self._slots.close()
            self._copier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _deadline_ns(self, timeout_s: float | None) -> int:
        return time.monotonic_ns() + int((self.timeout_s if timeout_s is None else timeout_s) * 1e9)

    def _transfer_ns(self, timeout_s: float | None) -> int:
        return time.monotonic_ns() + int((self.transfer_timeout_s if timeout_s is None else timeout_s) * 1e9)

    def _count(
        self, namespace: NamespaceHandle, build: Callable[[int], AnyRequest], keys: Keys, timeout_s: float | None
    ) -> int:
        return self._driver.run(self._queries.count(namespace, build, keys, self._deadline_ns(timeout_s)))
