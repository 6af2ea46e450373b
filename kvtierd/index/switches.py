"""Which scheme each sequence of the adaptive front has, which it is to have, and the switches under way."""

from __future__ import annotations

import dataclasses

from kvtierd.index.crossover import Account, Costs, Scheme
from kvtierd.index.sequence import Sequence


@dataclasses.dataclass(slots=True, eq=False)
class Entry:
    """A sequence, and where it is going."""

    sequence: Sequence
    target: Scheme
    eager: bool
    """It was tracked from its beginning, on the word of those before it in its namespace."""
    pinned: bool = False
    """Its scheme was asked for, and is not the front's to choose."""
    closing: bool = False
    account: Account = dataclasses.field(default_factory=Account)

    def settled(self) -> bool:
        """Whether there is nothing to move."""
        sequence = self.sequence
        match self.target:
            case Scheme.CUCKOO:
                return sequence.tracked == 0
            case Scheme.BITMAP:
                return sequence.tracked == sequence.length and sequence.extended == 0
            case Scheme.HYBRID:
                return sequence.extended == sequence.length

    def scheme(self) -> Scheme:
        """The scheme that all of the sequence has by now."""
        if self.sequence.length == 0 or self.sequence.tracked < self.sequence.length:
            return Scheme.CUCKOO
        return Scheme.HYBRID if self.sequence.extended == self.sequence.length else Scheme.BITMAP

    def advance(self, positions: int) -> int:
        """Move up to so many positions; returns how many."""
        sequence = self.sequence
        if self.target is Scheme.CUCKOO:
            return sequence.untrack(positions)
        if self.target is Scheme.BITMAP:
            sequence.shorten(0)
            return sequence.track(positions)
        done = sequence.track(positions)
        return done + sequence.extend(positions - done)


class Switches:
    """The sequences by number, and what is to be moved of them."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._entries: dict[int, Entry] = {}
        self._moving: dict[int, Entry] = {}
        self._waiting: dict[int, Entry] = {}
        """Those that cannot go on while the watch is full."""
        self._eager: set[int] = set()
        """Namespaces whose sequences were worth tracking lately."""
        self._switches = [0, 0]

    def add(self, number: int, sequence: Sequence) -> None:
        """A new sequence, with its first keys."""
        eager = sequence.namespace in self._eager and sequence.length >= self._costs.positions_min
        entry = Entry(sequence, Scheme.BITMAP if eager else Scheme.CUCKOO, eager)
        self._entries[number] = entry
        self.consider(number, entry)

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, number: int) -> Entry:
        """The entry of an open sequence; ValueError where it is not open."""
        entry = self._entries.get(number)
        if entry is None or entry.closing:
            raise ValueError(f"sequence {number} is not open")
        return entry

    def known(self, number: int) -> Entry:
        """The entry of a sequence that is open or being taken apart."""
        return self._entries[number]

    def close(self, number: int, entry: Entry) -> None:
        """Take a sequence apart, bit by bit, and forget it."""
        if entry.eager and not entry.account.paid(entry.sequence.length, self._costs):
            self._eager.discard(entry.sequence.namespace)
        entry.closing, entry.target = True, Scheme.CUCKOO
        self._waiting.pop(number, None)
        self._moving[number] = entry

    def consider(self, number: int, entry: Entry) -> None:
        """Choose the scheme of a sequence, if that is ours to do, and have it moved there if it can be."""
        if not entry.pinned and not entry.closing:
            before, entry.target = entry.target, entry.account.choose(entry.target, entry.sequence.length, self._costs)
            if entry.target is not before:
                self._switched(entry)
        if entry.target is Scheme.CUCKOO:
            self._waiting.pop(number, None)
        if number not in self._waiting and not entry.settled():
            self._moving[number] = entry

    @property
    def busy(self) -> bool:
        """Whether a switch is under way."""
        return bool(self._moving)

    def work(self, positions: int) -> bool:
        """Move so many positions of the switches under way, the oldest first; whether there are more."""
        while self._moving and positions > 0:
            number, entry = next(iter(self._moving.items()))
            done = entry.advance(positions)
            positions -= max(1, done)
            if entry.settled():
                del self._moving[number]
                if entry.closing:
                    del self._entries[number]
            elif done == 0:
                self._waiting[number] = self._moving.pop(number)
            if entry.target is Scheme.CUCKOO and done:
                self._moving |= self._waiting
                self._waiting.clear()
        return bool(self._moving)

    def stats(self) -> dict[str, int]:
        """Gauges and counters by name."""
        return {
            "sequences": len(self._entries),
            "sequences_moving": len(self._moving),
            "sequences_waiting": len(self._waiting),
            "switches_to_bitmap": self._switches[0],
            "switches_to_cuckoo": self._switches[1],
        }

    def _switched(self, entry: Entry) -> None:
        down = entry.target is Scheme.CUCKOO
        self._switches[down] += 1
        (self._eager.discard if down else self._eager.add)(entry.sequence.namespace)
