"""Leases and reservations: who may touch which slots until when. Pure bookkeeping; the manager acts on it."""

from __future__ import annotations

import collections
import dataclasses
import heapq
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvtierd.core.keys import Keys
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.tiers.namespaces import NamespaceEntry


@dataclasses.dataclass(slots=True, eq=False)
class Lease:
    """A client reads these host slots until it says so or time is up."""

    id: int
    session: int
    cls: SlotClass
    slots: Slots
    expires_ns: int
    others: tuple[tuple[SlotClass, Slots], ...] = ()
    """Slots of further classes: extents of other sizes."""

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.cls.tenant


@dataclasses.dataclass(slots=True, eq=False)
class Reservation:
    """A client writes these host slots. `position[i]` is where block i stood in the request's keys; `chain` has
    the rows of all of these keys, as they were then, `chain_ids` what policies know their blocks by, and `parent` is
    the key before the first, [1, 32], where the client told it.

    Time alone does not free it: the writer may be paused and still have the memory mapped. Past `expires_ns` it is
    quarantined, which hides its keys so that others can store them; its slots wait for Commit, Abort or the end of
    the owner's process.
    """

    id: int
    session: int
    entry: NamespaceEntry
    cls: SlotClass
    keys: Keys
    rows: npt.NDArray[np.int32]
    slots: Slots
    position: npt.NDArray[np.intp]
    chain: npt.NDArray[np.int32]
    chain_ids: npt.NDArray[np.uint64]
    parent: Keys | None
    expires_ns: int
    quarantined: bool = False
    busy: bool = False
    """A Put fills it, or a Commit of it is being verified."""
    abandoned: bool = False
    """Its owner's process is gone."""

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.cls.tenant


class _Expiring(Protocol):
    id: int
    session: int
    expires_ns: int

    @property
    def tenant(self) -> str:
        """Whose it is."""
        ...


T = TypeVar("T", bound=_Expiring)

SESSION_SHARE = 4
"""One client gets at most this part of all leases, so that it cannot use up those of the others."""


class Register(Generic[T]):
    """Things with an id, an owner and an expiry, bounded in number, in all, for one owner and for one tenant.

    Ids never repeat.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.session_limit = max(1, limit // SESSION_SHARE)
        self.tenant_limit = limit
        """Most of one tenant, over all of its clients."""
        self.items: dict[int, T] = {}
        self._heap: list[tuple[int, int]] = []
        self._next = 1
        self._owned: collections.Counter[int] = collections.Counter()
        self._of_tenant: collections.Counter[str] = collections.Counter()
        self.refused: collections.Counter[str] = collections.Counter()
        """By tenant: how often `tenant_limit` refused one."""

    def next_id(self, session: int, tenant: str) -> int | None:
        """An id for the next one of a session, or None when there are too many."""
        if len(self.items) >= self.limit or self._owned[session] >= self.session_limit:
            return None
        if self._of_tenant[tenant] >= self.tenant_limit:
            self.refused[tenant] += 1
            return None
        self._next += 1
        return self._next - 1

    def limits(self) -> str:
        """For whom `next_id` has none, in words."""
        of_tenant = f", {self.tenant_limit} a tenant (leases.tenant_share)" if self.tenant_limit < self.limit else ""
        return f"{self.session_limit} a client{of_tenant}, {self.limit} in all"

    def count_of(self, tenant: str) -> int:
        """How many there are of a tenant."""
        return self._of_tenant[tenant]

    def add(self, item: T) -> None:
        """Keep an item until `remove`."""
        self.items[item.id] = item
        self._owned[item.session] += 1
        self._of_tenant[item.tenant] += 1
        if len(self._heap) > 2 * len(self.items) + 1024:
            # Most entries are of items long removed: a busy client with a long time to live would pile them up.
            self._heap = [(kept.expires_ns, kept.id) for kept in self.items.values() if kept.id != item.id]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (item.expires_ns, item.id))

    def get(self, number: int, session: int) -> T | None:
        """The item, if it is this session's."""
        item = self.items.get(number)
        return item if item is not None and item.session == session else None

    def remove(self, item: T) -> None:
        """Forget an item; its heap entry goes when it comes up."""
        del self.items[item.id]
        self._owned[item.session] -= 1
        self._of_tenant[item.tenant] -= 1
        if not self._owned[item.session]:
            del self._owned[item.session]

    def expired(self, now_ns: int) -> list[T]:
        """Items whose time is up, each named once; they stay until removed."""
        out = []
        while self._heap and self._heap[0][0] <= now_ns:
            item = self.items.get(heapq.heappop(self._heap)[1])
            if item is not None:
                out.append(item)
        return out

    def of_session(self, session: int) -> list[T]:
        """Everything of one session."""
        return [item for item in self.items.values() if item.session == session]
