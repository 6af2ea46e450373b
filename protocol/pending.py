"""Requests under way in a client: those that somebody waits for, and commits whose answer is only counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvtierd.protocol.messages import AnyReply, CommitReply

Received = tuple[AnyReply, list[memoryview], int]
"""A reply, its raw frames, which are views into what ZeroMQ received, and the session it belongs to."""

MAX_HANDED_OVER = 1024


class Group:
    """Requests that somebody waits for together; `wake` is called when no more than `floor` of them are unanswered."""

    __slots__ = ("floor", "missing", "wake")

    def __init__(self, wake: Callable[[], None]) -> None:
        self.missing = 0
        self.floor = 0
        self.wake = wake


class Pending:
    """One request under way, and its reply once there is one."""

    __slots__ = ("group", "received", "session_no")

    def __init__(self, group: Group, session_no: int) -> None:
        self.group = group
        self.session_no = session_no
        self.received: Received | None = None


class Waited:
    """All requests under way that somebody waits for."""

    def __init__(self) -> None:
        self._items: dict[int, Pending] = {}

    def __len__(self) -> int:
        """How many have no answer yet."""
        return len(self._items)

    def add(self, request_id: int, group: Group, session_no: int) -> Pending:
        """A request was sent."""
        found = self._items[request_id] = Pending(group, session_no)
        group.missing += 1
        return found

    def take(self, request_id: int) -> Pending | None:
        """What a reply belongs to, which is nobody's any more."""
        return self._items.pop(request_id, None)

    def forget(self, group: Group) -> None:
        """Nobody waits for a group any more: a reply that comes now is late, and what it granted is given back."""
        for number in [number for number, pending in self._items.items() if pending.group is group]:
            del self._items[number]
        group.missing = 0

    def give_up(self) -> None:
        """Nobody will answer: let all go who wait."""
        groups = {pending.group for pending in self._items.values()}
        self.clear()
        for group in groups:
            group.missing = 0
            group.wake()

    def clear(self) -> None:
        """They belong to the parent of this process."""
        self._items.clear()


class HandedOver:
    """Blocks of commits that nobody waits for, by request; what became of them goes to `counters`."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._blocks: dict[int, int] = {}
        self._quiet: dict[int, int] = {}
        """Those that are answered only when they are refused, in the order in which the daemon serves them."""

    @property
    def full(self) -> bool:
        """Whether so many are unanswered that the next one has to be waited for."""
        return len(self._blocks) + len(self._quiet) >= MAX_HANDED_OVER

    def add(self, request_id: int, blocks: int, *, quiet: bool) -> None:
        """A commit was sent."""
        (self._quiet if quiet else self._blocks)[request_id] = blocks

    def settle_before(self, request_id: int) -> None:
        """The daemon answered a later request: it took, without a word, all that it was handed quietly before."""
        while self._quiet and (first := next(iter(self._quiet))) < request_id:
            del self._quiet[first]

    def settle(self, reply: AnyReply) -> bool:
        """Take a reply to one of them; False when it is to something else."""
        blocks = self._blocks.pop(reply.id, None) or self._quiet.pop(reply.id, None)
        if blocks is None:
            return False
        taken = reply.committed + reply.existed if isinstance(reply, CommitReply) else 0
        self._counters["stores_dropped_refused"] += blocks - taken
        return True

    def lose(self) -> None:
        """The session is gone: nobody will answer, and nobody can tell what was stored."""
        self._counters["stores_dropped_unavailable"] += sum(self._blocks.values())
        self._counters["stores_dropped_unavailable"] += sum(self._quiet.values())
        self.forget()

    def forget(self) -> None:
        """They belong to the parent of this process."""
        self._blocks.clear()
        self._quiet.clear()
