"""Which saves are to be told of in vLLM's KV events: those that all ranks have stored. No engine in here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Describe = Callable[[Any, int, int], Any]
"""Makes the event of blocks `begin` to `end` - 1 of a request; None where it cannot be told of them."""


@dataclasses.dataclass(slots=True)
class _Announced:
    """A save under way: blocks `begin` to `end` - 1 of a request, and how many leading ones each rank has so far."""

    request: Any
    begin: int
    end: int
    counts: list[int] = dataclasses.field(default_factory=list)


class Announcements:
    """Saves by number, from their planning to the last rank's word. Not thread-safe: vLLM's scheduler calls it.

    Every save that is planned ends on every rank, stored or not, so that what is kept is bounded by saves under way.
    """

    def __init__(self, ranks: int, describe: Describe) -> None:
        self._ranks = ranks
        self._describe = describe
        self._waiting: dict[int, _Announced] = {}
        self._events: list[Any] = []
        self._next = 1

    def plan(self, request: Any, begin: int, end: int) -> int:
        """A save of these blocks is planned: its number."""
        number, self._next = self._next, self._next + 1
        self._waiting[number] = _Announced(request, begin, end)
        return number

    def ended(self, saves: Mapping[int, Sequence[int]]) -> None:
        """Saves have ended on some ranks: by number, how many leading blocks each of these has now."""
        for number, counts in saves.items():
            save = self._waiting.get(number)
            if save is None:
                continue
            save.counts.extend(counts)
            if len(save.counts) >= self._ranks:
                del self._waiting[number]
                self._tell(save, min(save.counts))

    def take(self) -> list[Any]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    def _tell(self, save: _Announced, count: int) -> None:
        if count and (event := self._describe(save.request, save.begin, save.begin + count)) is not None:
            self._events.append(event)
