"""What vLLM's KV events are to tell of: blocks that all ranks have stored, or that were found, and those that are gone
again. No engine in here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvtierd.connectors.vllm_announced import Announced
from kvtierd.core.keys import Keys

Describe = Callable[[Any, int, int], Any]
"""Makes the event of blocks `begin` to `end` - 1 of a request, whose `block_hashes` are what the engine calls these;
None where it cannot be told of them."""
Revoke = Callable[[list[Any]], Any]
"""Makes the event that blocks of these names are gone."""


@dataclasses.dataclass(slots=True)
class _Save:
    """A save under way: blocks `begin` to `end` - 1 of a request, and how many leading ones each rank has so far."""

    request: Any
    begin: int
    end: int
    keys: Sequence[Keys]
    counts: list[int] = dataclasses.field(default_factory=list)


class Announcements:
    """Saves by number, from their planning to the last rank's word. Not thread-safe: vLLM's scheduler calls it.

    Every save that is planned ends on every rank, stored or not, so that what is kept is bounded by saves under way.
    """

    def __init__(self, ranks: int, describe: Describe, revoke: Revoke) -> None:
        self._ranks = ranks
        self._describe = describe
        self._revoke = revoke
        self.announced = Announced()
        """What was told of; the daemon's own events go there."""
        self._waiting: dict[int, _Save] = {}
        self._events: list[Any] = []
        self._next = 1

    def plan(self, request: Any, begin: int, end: int, keys: Sequence[Keys]) -> int:
        """A save of these blocks is planned: its number. `keys` are theirs, [end - begin, 32] uint8 for each rank."""
        number, self._next = self._next, self._next + 1
        self._waiting[number] = _Save(request, begin, end, keys)
        return number

    def found(self, request: Any, keys: Sequence[Keys]) -> None:
        """The daemon has these leading blocks of a request: those that were not told of, or counted as gone, are."""
        begin, end = self.announced.known(keys[0]), len(keys[0])
        if begin < end:
            self._tell(request, begin, end, [own[begin:] for own in keys])

    def ended(self, saves: Mapping[int, Sequence[int]]) -> None:
        """Saves have ended on some ranks: by number, how many leading blocks each of these has now."""
        for number, counts in saves.items():
            save = self._waiting.get(number)
            if save is None:
                continue
            save.counts.extend(counts)
            if len(save.counts) >= self._ranks:
                del self._waiting[number]
                count = min(save.counts)
                self._tell(save.request, save.begin, save.begin + count, [own[:count] for own in save.keys])

    def reset(self) -> None:
        """Nothing that was told of is of use any more."""
        self.announced.doubt()

    def take(self) -> list[Any]:
        """Events since the last call."""
        # In this order: what is gone was told of before it went, so that its own event is among these or was taken.
        gone = self.announced.take()
        events, self._events = self._events, []
        return [*events, self._revoke(gone)] if gone else events

    def _tell(self, request: Any, begin: int, end: int, keys: Sequence[Keys]) -> None:
        if begin < end and (event := self._describe(request, begin, end)) is not None:
            self._events.append(event)
            self.announced.tell(event.block_hashes, keys)
