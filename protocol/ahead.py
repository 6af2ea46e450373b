"""A long list of keys in batches, each asked for while the caller still works on the one before.

One round trip costs a batch of 64 MiB about a tenth of its copy, because every thread on the way has gone to sleep
meanwhile. Asked ahead, it is over when the copy is. Two batches are under way at most: the one that comes next, and, as
soon as the caller has told the end of the present one, the one behind it: both messages then cost one waking.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from kvtierd.core.keys import Keys
from kvtierd.protocol.asking import Begun, Plan
from kvtierd.protocol.grants import Build, Granted, Leased, reserve_request
from kvtierd.protocol.messages import Acquire, AnyRequest, Reserve
from kvtierd.protocol.results import NamespaceHandle
from kvtierd.protocol.slots import SlotPlans

T = TypeVar("T", Granted, Leased)


class _Ahead(Generic[T]):
    """`batch` keys at a time; at most two requests are ahead. `drop` ends it early. Raises ValueError for no batch."""

    def __init__(
        self, plans: SlotPlans, handle: NamespaceHandle, keys: Keys, batch: int, build: Build, parent: bytes = b""
    ) -> None:
        if batch < 1:
            raise ValueError(f"batch is {batch}; at least one block is wanted")
        self._plans, self._handle, self._build = plans, handle, build
        self._parent = parent
        self._pieces = [keys[at : at + batch] for at in range(0, len(keys), batch)]
        self._at = 0
        self._begun: dict[int, Begun | None] = {}

    def more(self, deadline_ns: int, ahead: int = 2) -> Plan[None]:
        """Ask for what comes, so that `ahead` batches are under way."""
        for at in range(self._at, min(self._at + ahead, len(self._pieces))):
            if at not in self._begun:
                self._begun[at] = None  # where this fails it is not tried again: whoever takes the batch asks for it
                build = self._build_at(at)
                self._begun[at] = yield from self._plans.begin(self._handle, build, self._pieces[at], deadline_ns)

    def _build_at(self, at: int) -> Build:
        """The request for a piece, which tells what comes before it."""
        parent = self._pieces[at - 1][-1].tobytes() if at else self._parent
        return behind(self._build, parent) if parent else self._build

    def _next(self) -> tuple[Keys, Begun | None]:
        at = self._at
        self._at += 1
        return self._pieces[at], self._begun.pop(at, None)

    def drop(self) -> Plan[None]:
        """Give back what was asked ahead; nothing comes any more."""
        self._at = len(self._pieces)
        while self._begun:
            _, begun = self._begun.popitem()
            if begun is not None:
                yield from self._plans.drop(begun)

    def let_go(self) -> None:
        """As `drop` for a plan that was interrupted: what comes is given back when it comes."""
        self._at = len(self._pieces)
        while self._begun:
            _, begun = self._begun.popitem()
            if begun is not None:
                self._plans.let_go(begun)


def behind(build: Build, parent: bytes) -> Build:
    """The same request for keys that come after the block with this key."""

    def made(numbers: list[int]) -> AnyRequest:
        request = build(numbers)
        assert isinstance(request, Acquire | Reserve)
        return msgspec.structs.replace(request, parent=parent)

    return made


class Leases(_Ahead[Leased]):
    """Leases on the leading run of present blocks, batch by batch."""

    def take(self, deadline_ns: int) -> Plan[Leased | None]:
        """The next lease, or None behind the last block of the run."""
        if self._at == len(self._pieces):
            return None
        build = self._build_at(self._at)
        piece, begun = self._next()
        leased = yield from self._plans.acquire(self._handle, piece, build, deadline_ns, begun)
        try:
            if leased.count < len(piece):
                yield from self.drop()  # a batch that is not whole ends the run
            yield from self.more(deadline_ns, 1)
        except BaseException:
            self._plans.end(leased)
            raise
        return leased if leased.count else None

    def turn(self, leased: Leased, deadline_ns: int) -> Plan[Leased | None]:
        """End a lease and take the next one."""
        self._plans.end(leased)
        yield from self.more(deadline_ns)
        return (yield from self.take(deadline_ns))


class Reservations(_Ahead[Granted]):
    """Slots to write into for all keys, batch by batch."""

    def __init__(self, plans: SlotPlans, handle: NamespaceHandle, keys: Keys, batch: int, parent: bytes = b"") -> None:
        super().__init__(plans, handle, keys, batch, reserve_request, parent)

    def take(self, deadline_ns: int) -> Plan[Granted | None]:
        """The next reservation, or None behind the last key."""
        if self._at == len(self._pieces):
            return None
        build = self._build_at(self._at)
        piece, begun = self._next()
        granted = yield from self._plans.reserve(self._handle, piece, build, deadline_ns, begun)
        try:
            yield from self.more(deadline_ns, 1)
        except BaseException:
            self._plans.give_back(granted)
            raise
        return granted
