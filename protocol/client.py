"""The synchronous client: what an engine calls (protocol/SPEC.md §9 describes its promises).

Thread-safe. Threads share one connection: one of those that wait polls the socket for all, so that a long fetch in
one thread does not hold up a lookup in another.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from kvtierd.core.checksum import Bytes, Sums
from kvtierd.core.keys import Keys
from kvtierd.core.namespace import Namespace
from kvtierd.protocol.connection import Connection, Group, Pending, Received
from kvtierd.protocol.copying import Copier, default_threads
from kvtierd.protocol.endpoint import default_endpoint
from kvtierd.protocol.messages import AnyRequest, Delete, Pin, Prefetch, Tier, Unpin
from kvtierd.protocol.operations import Ask, Connect, Granted, Leased, Operations, Plan, Step, Work, as_blocks
from kvtierd.protocol.results import Fetched, Hit, Masks, NamespaceHandle, Stored

T = TypeVar("T")

TIMEOUT_S = 0.1
"""For operations on metadata: an engine's scheduler waits for these."""
TRANSFER_TIMEOUT_S = 2.0
"""For operations that may move data."""
GRACE_NS = 5_000_000
"""How long a call on a lost session waits for the answer to a Hello that it could just send."""
SLICE_NS = 20_000_000
"""Longest sleep while a connection comes up: ZeroMQ tells of it, but only by an edge."""
MAX_UNANSWERED = 512
"""Requests of one batch sent before replies are taken in; under ZeroMQ's high-water mark."""


class _Waiter(Group):
    """A thread that waits: for its replies, or for its turn to poll."""

    __slots__ = ("event",)

    def __init__(self, wake: Callable[[_Waiter], None]) -> None:
        super().__init__(lambda: wake(self))
        self.event = threading.Event()


class Client:
    """A connection to kvtierd.

    `endpoint` is `ipc://PATH`; by default $KVTIERD_ENDPOINT, else the service's default tenant. No call outlives its
    deadline: `timeout_s` for metadata, `transfer_timeout_s` for data. Without a daemon lookups and fetches find
    nothing, stores are dropped, and `counters` count both; `ping`, `stats`, `flush` and `purge` raise Unavailable.
    RequestError and ValueError are the caller's mistakes. `arena=False` sends blocks in frames.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        transfer_timeout_s: float = TRANSFER_TIMEOUT_S,
        copy_threads: int | None = None,
        arena: bool = True,
        name: str = "",
    ) -> None:
        self.endpoint = endpoint or default_endpoint()
        self.timeout_s = timeout_s
        self.transfer_timeout_s = transfer_timeout_s
        self._connection = Connection(self.endpoint, name or f"python:{os.getpid()}")
        self._copier = Copier(copy_threads or default_threads())
        self._plans = Operations(self._connection, self._copier, use_arena=arena)
        self._lock = threading.Lock()
        self._tried = False
        self._leader: _Waiter | None = None
        self._followers: list[_Waiter] = []
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        _clients.add(self)

    @property
    def counters(self) -> Counter[str]:
        """What no result or exception tells: misses and drops without a daemon, sessions, late replies."""
        return self._connection.counters

    # Metadata

    def register(self, namespace: Namespace, *, allow_loss: bool = False) -> NamespaceHandle:
        """Name a namespace. Without a daemon the handle is registered with its first use.

        `allow_loss` permits FP8 for its cold blocks. Raises RequestError when the daemon refuses the namespace.
        """
        handle = NamespaceHandle(namespace, allow_loss=allow_loss)
        return self._run(self._plans.register(handle, self._deadline_ns(None)))

    def lookup(self, namespace: NamespaceHandle, keys: Keys, *, timeout_s: float | None = None) -> Hit:
        """How long is the stored prefix of `keys` ([n, 32] uint8)?"""
        return self._run(self._plans.lookup((namespace,), (keys,), self._deadline_ns(timeout_s)))

    def lookup_group(
        self, namespaces: Sequence[NamespaceHandle], keys: Sequence[Keys], *, timeout_s: float | None = None
    ) -> Hit:
        """The common prefix over several namespaces (groups or ranks), one array of keys each, of equal lengths."""
        return self._run(self._plans.lookup(namespaces, keys, self._deadline_ns(timeout_s)))

    def lookup_many(
        self, namespace: NamespaceHandle, keys: Sequence[Keys], *, timeout_s: float | None = None
    ) -> list[Hit]:
        """Look up many sequences at the cost of one round trip."""
        return self._run(self._plans.lookup_many(namespace, keys, self._deadline_ns(timeout_s)))

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
        return self._run(
            self._plans.count(
                namespace,
                lambda: Prefetch(id=0, namespace=namespace.number, tier=tier, wait=wait),
                keys,
                deadline_ns,
            )
        )

    def pin(self, namespace: NamespaceHandle, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Keep blocks until `unpin` or `close`; how many are pinned."""
        return self._count(namespace, lambda: Pin(id=0, namespace=namespace.number), keys, timeout_s)

    def unpin(self, namespace: NamespaceHandle, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Take back pins of this client; how many there were."""
        return self._count(namespace, lambda: Unpin(id=0, namespace=namespace.number), keys, timeout_s)

    def delete(self, namespace: NamespaceHandle, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Forget blocks in every tier; how many there were."""
        return self._count(namespace, lambda: Delete(id=0, namespace=namespace.number), keys, timeout_s)

    def purge(
        self, namespace: NamespaceHandle | None = None, *, tiers: Sequence[Tier] = (), timeout_s: float | None = None
    ) -> int:
        """Forget a namespace, or all of the tenant's; with `tiers` only copies there that are not the last one."""
        return self._run(self._plans.purge(namespace, tiers, self._transfer_ns(timeout_s)))

    def flush(self, *, timeout_s: float | None = None) -> None:
        """Return when every block committed before is on stable storage, or was dropped and counted."""
        self._run(self._plans.flush(self._transfer_ns(timeout_s)))

    def stats(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Counters and gauges of the daemon by name; units are in the names."""
        return self._run(self._plans.stats(self._deadline_ns(timeout_s)))

    def ping(self, *, timeout_s: float | None = None) -> int:
        """Round trip to the daemon in nanoseconds."""
        start_ns = time.monotonic_ns()
        self._run(self._plans.ping(self._deadline_ns(timeout_s)))
        return time.monotonic_ns() - start_ns

    # Data

    def reserve(self, namespace: NamespaceHandle, keys: Keys, *, timeout_s: float | None = None) -> Reservation:
        """Slots in the arena to write blocks into; where there is no arena every status is SLOT_BUSY."""
        grant = self._run(self._plans.reserve(namespace, keys, self._deadline_ns(timeout_s)))
        return Reservation(self, namespace, grant)

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
        plan = self._plans.acquire(namespace, keys, ttl_ms=ttl_ms, verify=verify, deadline_ns=deadline_ns)
        return Lease(self, namespace, self._run(plan))

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
        return self._run(self._plans.store(namespace, keys, flat, self._transfer_ns(timeout_s)))

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
        return self._run(self._plans.fetch(namespace, keys, out, verify=verify, deadline_ns=deadline_ns))

    # Life

    def close(self) -> None:
        """Hang up; leases, pins and unfinished reservations of this client end. A second call does nothing."""
        with self._lock:
            if self._connection.closed:
                return
            self._plans.close_arena()
            self._connection.close()
            os.close(self._wake_fd)
        self._copier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Waiting

    def _deadline_ns(self, timeout_s: float | None) -> int:
        return time.monotonic_ns() + int((self.timeout_s if timeout_s is None else timeout_s) * 1e9)

    def _transfer_ns(self, timeout_s: float | None) -> int:
        return time.monotonic_ns() + int((self.transfer_timeout_s if timeout_s is None else timeout_s) * 1e9)

    def _count(
        self, namespace: NamespaceHandle, build: Callable[[], AnyRequest], keys: Keys, timeout_s: float | None
    ) -> int:
        return self._run(self._plans.count(namespace, build, keys, self._deadline_ns(timeout_s)))

    def _run(self, plan: Plan[T]) -> T:
        try:
            step = next(plan)
            while True:
                step = self._take(plan, step)
        except StopIteration as done:
            result: T = done.value
            return result

    def _take(self, plan: Plan[T], step: Step) -> Step:
        try:
            outcome: object
            match step:
                case Ask():
                    outcome = self._ask(step)
                case Work():
                    outcome = step.function()
                case Connect():
                    outcome = self._connect(step.deadline_ns)
        except Exception as error:  # noqa: BLE001 - the plan decides what it means
            return plan.throw(error)
        return plan.send(outcome)

    def _connect(self, deadline_ns: int) -> bool:
        """Have a session. The first try waits for as long as it may; later ones fail fast while the daemon is away."""
        patient = not self._tried
        self._tried = True
        now_ns = time.monotonic_ns()
        if not patient:
            deadline_ns = min(deadline_ns, now_ns + GRACE_NS)
        while True:
            with self._lock:
                if self._connection.step(now_ns):
                    return True
                waiting = patient or self._connection.hello_sent
                if self._connection.refusal is not None and not self._connection.hello_sent:
                    return False
                descriptor = self._connection.fileno()
            left_ns = deadline_ns - time.monotonic_ns()
            if left_ns <= 0 or not waiting:
                return False
            select.select([descriptor], [], [], min(left_ns, SLICE_NS) / 1e9)
            now_ns = time.monotonic_ns()

    def _ask(self, step: Ask) -> list[Received | None]:
        waiter = _Waiter(self._wake)
        wire_ns = wire_deadline_ns(step.deadline_ns)
        pending: list[Pending | None] = []
        for request, frames in step.requests:
            with self._lock:
                if not self._connection.up:
                    break
                sent = self._connection.submit(request, frames, wire_ns, waiter)
            if sent is None:
                break
            pending.append(sent)
            if len(pending) % MAX_UNANSWERED == 0:
                self._wait(waiter, step.deadline_ns)
        if waiter.missing:
            self._wait(waiter, step.deadline_ns)
        with self._lock:
            if waiter.missing or len(pending) < len(step.requests):
                self._connection.forget(waiter)
                self._connection.lose()
        received = [item.received if item is not None else None for item in pending]
        return received + [None] * (len(step.requests) - len(received))

    def _wait(self, waiter: _Waiter, deadline_ns: int) -> None:
        """Wait for all replies of a batch; whichever thread waits first polls the socket for the others."""
        while waiter.missing:
            with self._lock:
                self._connection.drain()
                if not waiter.missing or not self._connection.is_open:
                    break
                leading = self._leader is None
                if leading:
                    self._leader = waiter
                    descriptor = self._connection.fileno()
                else:
                    waiter.event.clear()
                    self._followers.append(waiter)
            left_ns = deadline_ns - time.monotonic_ns()
            if leading:
                self._poll(descriptor, left_ns)
            elif left_ns > 0:
                waiter.event.wait(left_ns / 1e9)
            with self._lock:
                if leading:
                    self._leader = None
                elif waiter in self._followers:
                    self._followers.remove(waiter)
            if left_ns <= 0:
                break
        with self._lock:
            if self._leader is None and self._followers:
                self._followers[0].event.set()  # its turn to poll

    def _poll(self, descriptor: int, left_ns: int) -> None:
        if left_ns <= 0:
            return
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        poller.register(self._wake_fd, select.POLLIN)
        for ready, _ in poller.poll(-(-left_ns // 1_000_000)):
            if ready == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)

    def _wake(self, waiter: _Waiter) -> None:
        """Called under the lock by the thread that took in a waiter's last reply, which may be the waiter itself."""
        if waiter is self._leader:
            os.eventfd_write(self._wake_fd, 1)
        else:
            waiter.event.set()

    def _post(self, function: Callable[[int, int], None], number: int, session_no: int) -> None:
        with self._lock:
            if not self._connection.closed:
                function(number, session_no)

    def _after_fork(self) -> None:
        if self._connection.closed:
            return
        self._lock = threading.Lock()
        self._tried = False
        self._leader = None
        self._followers = []
        os.close(self._wake_fd)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._connection.abandon()
        self._plans.abandon()
        self._copier.abandon()


class Reservation:
    """Slots to write blocks into. `status` is [n] uint8 (SLOT_*); `views[i]` is the slot of block i, [slot_bytes] uint8
    with every layer part at a multiple of `layer_stride`, or None where it was not granted.

    Leaving the context without `commit` gives everything back.
    """

    def __init__(self, client: Client, namespace: NamespaceHandle, grant: Granted) -> None:
        self._client = client
        self._grant = grant
        self.namespace = namespace
        self.status: Masks = grant.status
        self.views: list[Bytes | None] = grant.views
        self.committed = 0

    def commit(
        self,
        index: Sequence[int] | None = None,
        *,
        sums: Sums | None = None,
        verify: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """Make blocks visible; how many are. `index` names them by position, None takes all that were granted.

        `sums` are their layer sums ([len(index), layers] u64) where the writer has them; otherwise they are hashed
        here. Blocks that are not named stay reserved. Raises ValueError for a block that was not granted.
        """
        client, grant = self._client, self._grant
        if index is None:
            index = [i for i, view in enumerate(grant.views) if view is not None]
        views = granted_views(grant, index)
        geometry = self.namespace.geometry
        if sums is None:
            sums = client._copier.sum_slots(views, geometry)
        elif sums.shape != (len(index), geometry.layers):
            raise ValueError(f"sums have shape {sums.shape}; {(len(index), geometry.layers)} is wanted")
        deadline_ns = client._transfer_ns(timeout_s)
        plan = client._plans.commit(
            grant, index, np.ascontiguousarray(sums, np.uint64), verify=verify, deadline_ns=deadline_ns
        )
        reply = client._run(plan)
        if reply.committed + reply.existed == len(index):
            for i in index:
                grant.views[i] = None
        self.committed += reply.committed
        return reply.committed

    def abort(self) -> None:
        """Give back what is not committed; does not wait."""
        if self._grant.number and any(view is not None for view in self._grant.views):
            self._client._post(self._client._plans.abort, self._grant.number, self._grant.session_no)
        self._grant.number = 0
        self._grant.views[:] = [None] * len(self._grant.views)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class Lease:
    """A hold on the leading run of present blocks, `count` of them; a context manager that releases.

    `views` are read-only slots ([slot_bytes] uint8), `sums` their layer sums ([count, layers] u64), `sources` where
    each was found. A view may be overwritten once the lease has expired: `copy_to` tells what can be trusted.
    """

    def __init__(self, client: Client, namespace: NamespaceHandle, leased: Leased) -> None:
        self._client = client
        self._leased = leased
        self.namespace = namespace
        self.count = leased.count
        self.views: list[Bytes] = leased.views
        self.sums: Sums = leased.sums
        self.sources: Masks = leased.sources

    def copy_to(self, out: Bytes, *, verify: bool = True) -> int:
        """Copy the blocks packed into `out` ([>= count, block_bytes] uint8); how many leading ones are good.

        Good means that the slot did not change hands while it was copied and, with `verify`, that the checksum of
        the copy is the stored one.
        """
        check_out(out, self.count, self.namespace.geometry.block_bytes)
        return self._client._run(self._client._plans.copy_out(self._leased, out, self.namespace, verify=verify))

    def unchanged(self) -> int:
        """How many leading blocks are still in their slots: what was read from `views` before is whole."""
        return self._leased.unchanged()

    def release(self) -> None:
        """End the lease; does not wait, and a second call does nothing."""
        if self._leased.number:
            self._client._post(self._client._plans.release, self._leased.number, self._leased.session_no)
            self._leased.number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def check_out(out: Bytes | None, count: int, block_bytes: int) -> None:
    """Raise ValueError when `out` cannot take `count` packed blocks."""
    if out is None:
        return
    if out.dtype != np.uint8 or out.ndim != 2 or out.shape[1] != block_bytes or out.shape[0] < count:
        raise ValueError(f"out is {out.dtype} {out.shape}; uint8 [at least {count}, {block_bytes}] is wanted")
    if not out[0:1].flags.c_contiguous or not out.flags.writeable:
        raise ValueError("out must be writable, and each of its blocks contiguous")


def granted_views(grant: Granted, index: Sequence[int]) -> list[Bytes]:
    """The views of these blocks; ValueError naming one that was not granted."""
    views = []
    for i in index:
        view = grant.views[i] if 0 <= i < len(grant.views) else None
        if view is None:
            raise ValueError(f"block {i} of the reservation was not granted, or is committed already")
        views.append(view)
    return views


def wire_deadline_ns(deadline_ns: int) -> int:
    """The daemon's deadline, a little before ours: a late answer should be its `deadline`, not silence."""
    left_ns = deadline_ns - time.monotonic_ns()
    return deadline_ns - min(20_000_000, max(0, left_ns) // 10)


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
