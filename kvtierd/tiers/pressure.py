"""Admission to the host tier while it thrashes: what was used lately stays, and the rest passes through a small part.

A tier whose working set is larger than itself evicts what is asked for next, so that nobody hits. Then it is better
that some hit: while a class of slots thrashes (kvtierd.policy.thrash), blocks that were used within the guard's time
are out of reach, and whatever needs a place takes one of a few **passing** slots, whose blocks go again in the order
in which they came. A stream longer than the tier still flows, through fewer slots; what finds none of them free is
refused, with a hint when to ask again. Each class is judged by itself, so that a model with small blocks that
thrashes refuses nothing to one with large ones.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from kvtierd.core.clock import Clock
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.index.memory import reserve
from kvtierd.policy.key_filter import KeyFilter
from kvtierd.policy.thrash import SECOND_NS, ThrashGuard
from kvtierd.protocol.messages import TIER_HOST
from kvtierd.tiers.blocks import Blocks, Rows
from kvtierd.tiers.host_tier import HostTier

PASSING_SHARE = 8
"""One slot of so many is a passing one, at most, while a class thrashes."""
RETRY_MS = 20
"""Where nothing thrashes: about the time in which a batch of leases ends or a chunk is made."""


@dataclasses.dataclass(slots=True, eq=False)
class _Watch:
    """One class: its guard, and its passing slots in the order of their filling."""

    guard: ThrashGuard
    passing: Slots


class Pressure:
    """Watches the classes of the host tier. Everything runs on the loop."""

    def __init__(
        self, blocks: Blocks, host: HostTier, clock: Clock, counters: collections.Counter[str], secret: int
    ) -> None:
        self._blocks = blocks
        self._host = host
        self._clock = clock
        self._counters = counters
        self._secret = secret
        self._watches: dict[int, _Watch] = {}
        self._is_passing = reserve((host.pool.slots_max,), np.bool_, huge=False)

    def wanted(self, cls: SlotClass, rows: Rows) -> None:
        """These blocks need slots, whether they get them or not."""
        if (watch := self._watch(cls)) is not None:
            watch.guard.wanted(self._blocks.ids(rows), self._clock.now_ns())
            self._settle(watch)

    def lately_evicted(self, cls: SlotClass, rows: Rows) -> int:
        """How many of these blocks, which need slots, had left the tier lately; then `count` them."""
        watch = self._watch(cls)
        return 0 if watch is None else watch.guard.lately_evicted(self._blocks.ids(rows))

    def count(self, cls: SlotClass, wanted: int, returned: int) -> None:
        """So many blocks needed slots, whether they have got them or not; so many of them had left the tier lately."""
        if (watch := self._watch(cls)) is not None:
            watch.guard.count(wanted, returned, self._clock.now_ns())
            self._settle(watch)

    def is_calm(self, cls: SlotClass) -> bool:
        """Whether a class has slots and does not thrash."""
        watch = self._watch(cls)
        return watch is not None and not watch.guard.active

    def evicted_keys(self, cls: SlotClass) -> KeyFilter | None:
        """What remembers the blocks that left a class."""
        watch = self._watches.get(cls.id)
        return None if watch is None else watch.guard.evicted_keys

    def evicted(self, cls: SlotClass, rows: Rows) -> None:
        """These blocks are about to lose their slots to others."""
        if (watch := self._watch(cls)) is not None:
            watch.guard.evicted(self._blocks.ids(rows))

    def victims(self, cls: SlotClass, count: int) -> Slots:
        """Up to `count` unheld slots that may go now."""
        found = self._host.victims(cls, count)
        watch = self._watches.get(cls.id)
        return found if watch is None or not watch.guard.active else self._may_go(cls, watch, found, count)

    def thrashes(self, cls: SlotClass) -> bool:
        """Whether a class does."""
        watch = self._watches.get(cls.id)
        return watch is not None and watch.guard.active

    def retry_ms(self, cls: SlotClass, blocks: int) -> int:
        """When to ask again for so many blocks that were refused."""
        watch = self._watches.get(cls.id)
        return watch.guard.retry_after_ms(blocks) if watch is not None and watch.guard.active else RETRY_MS

    def tick(self) -> None:
        """Let states end by themselves; call it every so often."""
        now_ns = self._clock.now_ns()
        for watch in self._watches.values():
            watch.guard.tick(now_ns)
            self._settle(watch)

    def stats(self) -> dict[str, float | int]:
        """Gauges: how many classes thrash, and the share of the one that is worst off."""
        guards = [watch.guard for watch in self._watches.values()]
        self._counters["thrash_episodes"] = sum(guard.episodes for guard in guards)
        return {
            "thrash_active_classes": sum(guard.active for guard in guards),
            "thrash_refetched_share": max((guard.share for guard in guards), default=0.0),
        }

    def _watch(self, cls: SlotClass) -> _Watch | None:
        """The watch over a class, at its size of now; None for one without slots."""
        watch = self._watches.get(cls.id)
        if watch is not None and watch.guard.capacity == cls.total:
            return watch
        if not cls.total:
            return None
        if watch is None:
            guard = ThrashGuard(cls.total, self._secret, self._clock.now_ns())
            watch = self._watches[cls.id] = _Watch(guard, np.empty(0, np.int32))
        else:
            # A slab came or went, and with it the numbers of its slots: the passing ones are chosen anew.
            watch.guard.resize(cls.total)
            self._forget_passing(watch)
        return watch

    def _settle(self, watch: _Watch) -> None:
        if watch.passing.size and not watch.guard.active:
            self._forget_passing(watch)

    def _forget_passing(self, watch: _Watch) -> None:
        self._is_passing[watch.passing] = False
        watch.passing = np.empty(0, np.int32)

    def _may_go(self, cls: SlotClass, watch: _Watch, found: Slots, count: int) -> Slots:
        """Of what the policy would evict what is cold or passing, then other passing slots, then some more to pass."""
        pool, table = self._host.pool, self._blocks.table
        age_s = self._clock.now_ns() // SECOND_NS - table.last_access_s[pool.row[found]].astype(np.int64)
        free = (age_s * SECOND_NS >= watch.guard.protect_ns) | self._is_passing[found]
        chosen, warm = found[free], found[~free]
        if chosen.size < count:
            # The last to come goes first: of a prefix that passes that is its tail.
            ring = watch.passing[::-1]
            ring = ring[~np.isin(ring, chosen)]
            idle = ring[(pool.holds[ring] == 0) & (pool.row[ring] >= 0)][: count - chosen.size]
            chosen = np.concatenate([chosen, idle])
        more = warm[: max(0, min(count - chosen.size, max(1, cls.total // PASSING_SHARE) - watch.passing.size))]
        chosen = self._without_holes(np.concatenate([chosen, more]))
        more = more[np.isin(more, chosen)]
        self._is_passing[more] = True
        again = chosen[self._is_passing[chosen]]
        watch.passing = np.concatenate([watch.passing[~np.isin(watch.passing, again)], again])
        self._counters["thrash_refused_blocks"] += count - chosen.size
        return chosen

    def _without_holes(self, chosen: Slots) -> Slots:
        """Those that may go together: no last copy goes whose next block stays, which would have a hole before it.

        What the policy orders by tails is no longer in that order once some of it is out of reach.
        """
        row, table = self._host.pool.row, self._blocks.table
        while chosen.size:
            rows = row[chosen]
            behind, last = table.next_row[rows], self._blocks.residency(rows) == TIER_HOST
            hole = last & (behind >= 0) & (table.host_slot[behind] >= 0) & ~np.isin(behind, rows)
            if not hole.any():
                break
            chosen = chosen[~hole]
        return chosen
