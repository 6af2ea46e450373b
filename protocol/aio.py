"""The asynchronous client: the same operations as coroutines, on the same plans and connection as `Client`."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self

from kvtierd.core.checksum import Bytes, CopyParts, Sums
from kvtierd.core.keys import Keys, as_keys
from kvtierd.core.namespace import Namespace
from kvtierd.protocol.ahead import Leases, Reservations
from kvtierd.protocol.aio_driver import AsyncDriver
from kvtierd.protocol.aio_parts import AsyncParts
from kvtierd.protocol.asking import Asking
from kvtierd.protocol.attention_aio import AsyncAttention
from kvtierd.protocol.client import BATCH, TIMEOUT_S, TRANSFER_TIMEOUT_S
from kvtierd.protocol.connection import Connection
from kvtierd.protocol.copying import Copier, default_threads
from kvtierd.protocol.curve import CurveKeys
from kvtierd.protocol.endpoint import default_endpoint
from kvtierd.protocol.grants import Granted, Leased, acquire_request, reserve_request
from kvtierd.protocol.holds import After, LeasedSlots, ReservedSlots, check_out
from kvtierd.protocol.messages import AnyRequest, Delete, Pin, Prefetch, Tier, Unpin
from kvtierd.protocol.queries import Queries
from kvtierd.protocol.results import Fetched, Hit, NamespaceHandle, Stored
from kvtierd.protocol.slots import SlotPlans
from kvtierd.protocol.transfers import Transfers, as_blocks


class AsyncClient(AsyncParts, AsyncAttention):
    """A connection to kvtierd for one event loop; arguments, results and errors are those of `Client`.

    Operations run side by side; cancelling one gives back what it holds, after a copy that was under way has ended.
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
        self._driver = AsyncDriver(self._connection, (self._slots.abandon, self._copier.abandon))

    @property
    def counters(self) -> Counter[str]:
        """What no result or exception tells: misses and drops without a daemon, sessions, late replies."""
        return self._connection.counters

    # Metadata

    async def register(self, namespace: Namespace, *, allow_loss: bool = False, ttl_s: int = 0) -> NamespaceHandle:
        """As `Client.register`."""
        handle = NamespaceHandle(namespace, allow_loss=allow_loss, ttl_s=ttl_s)
        return await self._driver.run(self._queries.register(handle, self._deadline_ns(None)))

    async def lookup(
        self,
        namespace: NamespaceHandle,
        keys: Keys,
        *,
        prefill_tokens_per_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Hit:
        """As `Client.lookup`."""
        plan = self._queries.lookup((namespace,), (keys,), self._deadline_ns(timeout_s), prefill_tokens_per_s)
        return await self._driver.run(plan)

    async def lookup_group(
        self,
        namespaces: Sequence[NamespaceHandle],
        keys: Sequence[Keys],
        *,
        prefill_tokens_per_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Hit:
        """As `Client.lookup_group`."""
        plan = self._queries.lookup(namespaces, keys, self._deadline_ns(timeout_s), prefill_tokens_per_s)
        return await self._driver.run(plan)

    async def lookup_many(
        self, namespace: NamespaceHandle, keys: Sequence[Keys], *, timeout_s: float | None = None
    ) -> list[Hit]:
        """As `Client.lookup_many`."""
        return await self._driver.run(self._queries.lookup_many(namespace, keys, self._deadline_ns(timeout_s)))

    async def prefetch(
        self,
        namespace: NamespaceHandle,
        keys: Keys,
        *,
        tier: Tier = "host",
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """As `Client.prefetch`."""
        deadline_ns = self._transfer_ns(timeout_s) if wait else self._deadline_ns(timeout_s)

        def build(number: int) -> AnyRequest:
            return Prefetch(id=0, namespace=number, tier=tier, wait=wait)

        return await self._driver.run(self._queries.count(namespace, build, keys, deadline_ns))

    async def pin(self, namespace: NamespaceHandle, keys: Keys, *, timeout_s: float | None = None) -> int:
        """As `Client.pin`."""
        return await self._count(namespace, lambda number: Pin(id=0, namespace=number), keys, timeout_s)

    async def unpin(self, namespace: NamespaceHandle, keys: Keys, *, timeout_s: float | None = None) -> int:
        """As `Client.unpin`."""
        return await self._count(namespace, lambda number: Unpin(id=0, namespace=number), keys, timeout_s)

    async def delete(self, namespace: NamespaceHandle, keys: Keys, *, timeout_s: float | None = None) -> int:
        """As `Client.delete`."""
        return await self._count(namespace, lambda number: Delete(id=0, namespace=number), keys, timeout_s)

    async def purge(
        self, namespace: NamespaceHandle | None = None, *, tiers: Sequence[Tier] = (), timeout_s: float | None = None
    ) -> int:
        """As `Client.purge`."""
        return await self._driver.run(self._queries.purge(namespace, tiers, self._transfer_ns(timeout_s)))

    async def flush(self, *, timeout_s: float | None = None) -> None:
        """As `Client.flush`."""
        await self._driver.run(self._queries.flush(self._transfer_ns(timeout_s)))

    async def stats(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """As `Client.stats`."""
        return await self._driver.run(self._queries.stats(self._deadline_ns(timeout_s)))

    async def ping(self, *, timeout_s: float | None = None) -> int:
        """As `Client.ping`."""
        start_ns = time.monotonic_ns()
        await self._driver.run(self._queries.ping(self._deadline_ns(timeout_s)))
        return time.monotonic_ns() - start_ns

    # Data

    async def reserve(
        self, namespace: NamespaceHandle, keys: Keys, *, timeout_s: float | None = None
    ) -> AsyncReservation:
        """As `Client.reserve`."""
        grant = await self._driver.run(
            self._slots.reserve(namespace, keys, reserve_request, self._deadline_ns(timeout_s))
        )
        return AsyncReservation(self._driver, self._slots, namespace, grant, self.transfer_timeout_s)

    async def acquire(
        self,
        namespace: NamespaceHandle,
        keys: Keys,
        *,
        ttl_s: float | None = None,
        verify: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncLease:
        """As `Client.acquire`."""
        ttl_ms = 0 if ttl_s is None else max(1, int(ttl_s * 1000))
        deadline_ns = self._transfer_ns(timeout_s)
        plan = self._slots.acquire(namespace, keys, acquire_request(ttl_ms=ttl_ms, verify=verify), deadline_ns)
        return AsyncLease(self._driver, self._slots, namespace, await self._driver.run(plan))

    async def leases(
        self,
        namespace: NamespaceHandle,
        keys: Keys,
        *,
        batch: int = BATCH,
        ttl_s: float | None = None,
        verify: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncIterator[AsyncLease]:
        """As `Client.leases`; close it (`contextlib.aclosing`) when you leave it before its end."""
        ttl_ms = 0 if ttl_s is None else max(1, int(ttl_s * 1000))
        ahead = Leases(self._slots, namespace, as_keys(keys), batch, acquire_request(ttl_ms=ttl_ms, verify=verify))
        try:
            leased = await self._driver.run(ahead.take(self._transfer_ns(timeout_s)))
            while leased is not None:
                async with AsyncLease(self._driver, self._slots, namespace, leased) as lease:
                    yield lease
                    leased = await self._driver.run(ahead.turn(leased, self._transfer_ns(timeout_s)))
        finally:
            await self._driver.run(ahead.drop())

    async def reservations(
        self, namespace: NamespaceHandle, keys: Keys, *, batch: int = BATCH, timeout_s: float | None = None
    ) -> AsyncIterator[AsyncReservation]:
        """As `Client.reservations`; close it (`contextlib.aclosing`) when you leave it before its end."""
        ahead = Reservations(self._slots, namespace, as_keys(keys), batch)
        try:
            while (grant := await self._driver.run(ahead.take(self._deadline_ns(timeout_s)))) is not None:
                async with AsyncReservation(
                    self._driver, self._slots, namespace, grant, self.transfer_timeout_s, ahead.more
                ) as reservation:
                    yield reservation
        finally:
            await self._driver.run(ahead.drop())

    async def store(
        self,
        namespace: NamespaceHandle,
        keys: Keys,
        blocks: Bytes | Sequence[Bytes],
        *,
        timeout_s: float | None = None,
    ) -> Stored:
        """As `Client.store`."""
        flat = as_blocks(blocks, len(keys), namespace.geometry.block_bytes)
        return await self._driver.run(self._transfers.store(namespace, keys, flat, self._transfer_ns(timeout_s)))

    async def fetch(
        self,
        namespace: NamespaceHandle,
        keys: Keys,
        out: Bytes | None = None,
        *,
        verify: bool = True,
        timeout_s: float | None = None,
    ) -> Fetched:
        """As `Client.fetch`."""
        check_out(out, len(keys), namespace.geometry.block_bytes)
        deadline_ns = self._transfer_ns(timeout_s)
        return await self._driver.run(
            self._transfers.fetch(namespace, keys, out, verify=verify, deadline_ns=deadline_ns)
        )

    # Life

    async def close(self) -> None:
        """As `Client.close`."""
        if await self._driver.close():
            self._slots.close()
            self._copier.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _deadline_ns(self, timeout_s: float | None) -> int:
        return time.monotonic_ns() + int((self.timeout_s if timeout_s is None else timeout_s) * 1e9)

    def _transfer_ns(self, timeout_s: float | None) -> int:
        return time.monotonic_ns() + int((self.transfer_timeout_s if timeout_s is None else timeout_s) * 1e9)

    async def _count(
        self, namespace: NamespaceHandle, build: Callable[[int], AnyRequest], keys: Keys, timeout_s: float | None
    ) -> int:
        return await self._driver.run(self._queries.count(namespace, build, keys, self._deadline_ns(timeout_s)))


class AsyncReservation(ReservedSlots):
    """As `Reservation`, for `async with`."""

    def __init__(
        self,
        driver: AsyncDriver,
        plans: SlotPlans,
        namespace: NamespaceHandle,
        grant: Granted,
        timeout_s: float,
        after: After | None = None,
    ) -> None:
        super().__init__(plans, namespace, grant, timeout_s, after)
        self._driver = driver

    async def commit(
        self,
        index: Sequence[int] | None = None,
        *,
        sums: Sums | None = None,
        verify: bool = False,
        wait: bool = True,
        timeout_s: float | None = None,
    ) -> int:
        """As `Reservation.commit`."""
        deadline_ns = self._deadline_ns(timeout_s)
        plan = self._plans.commit(
            self._grant, self.namespace, index, sums, verify=verify, wait=wait, deadline_ns=deadline_ns
        )
        reply = await self._driver.run(plan)
        if self._after is not None and not wait:
            await self._driver.run(self._after(deadline_ns))
        return reply.committed + reply.existed

    def abort(self) -> None:
        """As `Reservation.abort`: it does not wait."""
        self._driver.post(lambda: self._plans.give_back(self._grant))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class AsyncLease(LeasedSlots):
    """As `Lease`, for `async with`."""

    def __init__(self, driver: AsyncDriver, plans: SlotPlans, namespace: NamespaceHandle, leased: Leased) -> None:
        super().__init__(plans, namespace, leased)
        self._driver = driver

    async def copy_to(self, out: Bytes, *, verify: bool = True) -> int:
        """As `Lease.copy_to`; the copy runs in a thread."""
        check_out(out, self.count, self.namespace.geometry.block_bytes)
        return await self._driver.run(self._plans.copy_out(self._leased, out, self.namespace, verify=verify))

    def release(self) -> None:
        """As `Lease.release`: it does not wait."""
        self._driver.post(lambda: self._plans.end(self._leased))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
