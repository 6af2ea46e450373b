"""When to keep a sequence's presence in step, and when to probe the page table for it: decided by what each costs.

A question about n positions costs n probes, unless they are tracked; then it costs next to nothing, but tracking them
had its price first, and every block that comes or goes costs a little more. Neither how often a sequence will be asked
about nor how often its blocks will change is known beforehand, so the rule is that of the ski rental: track it once
probing has cost as much as tracking would have, and give up once the changes have cost that much more than the
questions saved. Whatever happens, that costs at most about twice what the better of the two would have.
Source: A. Karlin, M. Manasse, L. Rudolph, D. Sleator, "Competitive snoopy caching", 1988.
"""

from __future__ import annotations

import dataclasses
import enum


class Scheme(enum.IntEnum):
    """How questions about the blocks of a sequence are answered."""

    CUCKOO = 0
    """Its keys are probed in the page table."""
    BITMAP = 1
    """Presence is a hierarchical bitmap over its positions, and rows a column beside it."""
    HYBRID = 2
    """The same, and its extents are in a hybrid index: they may be split and merged."""


@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """What the choice depends on, in nanoseconds of this kind of machine; only their proportions matter."""

    probe_ns: float
    """To look up one position of a range in the page table."""
    track_ns: float
    """To take one position into what is kept in step, and out of it again."""
    begin_ns: float
    """To begin and to end with that, however short the sequence."""
    update_ns: float
    """To keep it in step with one block that comes or goes."""
    positions_min: int
    """A shorter sequence is not tracked: its columns would take more than they hold, a page each at least."""

    def price_ns(self, positions: int) -> float:
        """What it costs to track a sequence of this length."""
        return self.begin_ns + positions * self.track_ns


MEASURED = Costs(probe_ns=22, track_ns=590, begin_ns=200_000, update_ns=310, positions_min=640)
"""By `kvtierctl bench index`, rows "front, cost of …". Columns begin with five pages; from 640 positions on that is no
more than the 32 bytes of a key for each."""


@dataclasses.dataclass(slots=True)
class Account:
    """What tracking one sequence saves, or would save, less what it costs, since the last switch."""

    balance_ns: float = 0.0

    def asked(self, positions: int, costs: Costs) -> None:
        """A question was about so many positions."""
        self.balance_ns += positions * costs.probe_ns

    def changed(self, positions: int, costs: Costs) -> None:
        """Blocks at so many tracked positions came or went."""
        self.balance_ns -= positions * costs.update_ns

    def paid(self, positions: int, costs: Costs) -> bool:
        """Whether the questions asked have been worth tracking so many positions."""
        return self.balance_ns >= costs.price_ns(positions)

    def choose(self, present: Scheme, positions: int, costs: Costs) -> Scheme:
        """The scheme that a sequence should have: CUCKOO or BITMAP."""
        price_ns = costs.price_ns(positions)
        if present is Scheme.CUCKOO:
            if positions < costs.positions_min or self.balance_ns < price_ns:
                return Scheme.CUCKOO
            self.balance_ns = 0.0
            return Scheme.BITMAP
        self.balance_ns = min(self.balance_ns, price_ns)
        if self.balance_ns > -price_ns:
            return Scheme.BITMAP
        self.balance_ns = 0.0
        return Scheme.CUCKOO
