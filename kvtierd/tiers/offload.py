"""Which blocks go to nvme: whole prefixes that the admission policy admits, never what lies behind a hole.

Asked whenever a prefix is stored or read. What of its admitted run is in host and not on disk is handed to the
write-behind; so a block that was dropped on its way there, or not admitted at its first use, gets another chance with
the next use, and until then nothing behind it is written.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtierd.config.schema import Nvme
from kvtierd.core.clock import Clock
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.policy.admission import Admission, AdmitAll, Budgeted, SecondAccess, leading
from kvtierd.policy.key_filter import KeyFilter
from kvtierd.protocol.messages import TIER_HOST, TIER_NVME
from kvtierd.tiers.blocks import OFFLOADING, RETURNED, VISIBLE, Rows
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.write_behind import WriteBehind

SEEN_MAX = 1 << 22
"""Keys that are remembered after their blocks are gone, 4 bytes each: a store of one of them is a second use."""
AFTER_FAILURE_NS = 10_000_000_000
"""How long nothing old is offered again to a disk that refused a block; new prefixes always are."""


class Offload:
    """Decides what is written, and counts what is not."""

    def __init__(
        self, copies: Copies, write_behind: WriteBehind, settings: Nvme, rows_max: int, clock: Clock, secret: int
    ) -> None:
        self._copies = copies
        self._write_behind = write_behind
        self._clock = clock
        self._budget: Budgeted | None = None
        self._policy = self._chosen(settings, clock.now_ns())
        everything = isinstance(self._policy, AdmitAll)
        self._seen = None if everything else KeyFilter(min(SEEN_MAX, rows_max), secret)

    def _chosen(self, settings: Nvme, now_ns: int) -> Admission:
        policy: Admission = SecondAccess() if settings.admission == "second-access" else AdmitAll()
        if settings.daily_write_budget:
            scarce = SecondAccess() if settings.admission == "budgeted" else None
            policy = self._budget = Budgeted(policy, settings.daily_write_budget, now_ns, scarce=scarce)
        return policy

    def stored(self, entry: NamespaceEntry, cls: SlotClass, chain: Rows, fresh: Rows, *, open_end: bool) -> None:
        """`fresh` blocks of a prefix became visible; `chain` has the rows of all of it, -1 where there is no block.

        `open_end` says that the prefix does not begin here and the block before it is not on its way to nvme.
        """
        if self._seen is not None:
            seen = self._seen.add(self._copies.blocks.ids(fresh))
            self._copies.blocks.mark_as(fresh[seen], RETURNED)
        prefix = chain[: leading(chain >= 0)]
        behind_refused = self._disk_refused() and self._lacks_older(prefix, fresh)
        self._offer(entry, cls, prefix, open_end=open_end or behind_refused)

    def read(self, entry: NamespaceEntry, cls: SlotClass, rows: Rows, *, open_end: bool) -> None:
        """A prefix was read, all of which is in host."""
        flags = self._copies.blocks.table.flags[rows]
        if np.count_nonzero(flags & TIER_NVME) < rows.size and not self._disk_refused():
            self._offer(entry, cls, rows, open_end=open_end)

    def clients_copy(self, copy_ns: float) -> None:
        """A client was given blocks in host that one thread takes `copy_ns` to copy: writes may wait a little."""
        self._write_behind.patience.clients_copy(copy_ns)

    def recovered(self, entry: NamespaceEntry, cls: SlotClass, rows: Rows, slots: Slots) -> None:
        """Blocks of the life before that are in host and not on disk, in the order in which they were stored.

        Where all prefixes are admitted they were on their way when it ended. Other policies decide when they are used.
        """
        if rows.size and isinstance(self._policy, AdmitAll):
            if (quota := self._write_behind.quota) is not None:
                rows = quota.leading(entry, rows)
            self._write_behind.add(entry, cls, rows, slots[: rows.size])

    def follows_a_hole(self, row: int) -> bool:
        """Whether the block in this row, -1 for none, has no copy on nvme and none on its way there."""
        if row < 0:
            return True
        table = self._copies.blocks.table
        return not (table.flags[row] & TIER_NVME or table.marks[row] & OFFLOADING)

    def rewritten(self, written_bytes: int) -> None:
        """The store wrote hot blocks again when it recycled a segment: that wears the disk as any other write."""
        if self._budget is not None:
            self._budget.charge(written_bytes)

    def level_bytes(self) -> int:
        """What the daily budget allows to be written now; 0 without a budget."""
        return max(0, int(self._budget.level_bytes(self._clock.now_ns()))) if self._budget else 0

    def _disk_refused(self) -> bool:
        return self._clock.now_ns() < self._write_behind.failed_ns + AFTER_FAILURE_NS

    def _lacks_older(self, rows: Rows, fresh: Rows) -> bool:
        """Whether blocks of a prefix that are not these fresh ones should be on nvme and are not."""
        there, run = self._there(rows)
        return not np.isin(rows[:run][~there[:run]], fresh).all()

    def _offer(self, entry: NamespaceEntry, cls: SlotClass, rows: Rows, *, open_end: bool) -> None:
        there, run = self._there(rows)
        rows, there = rows[:run], there[:run]
        missing = run - int(np.count_nonzero(there))
        if not missing:
            return
        counters, block_bytes = self._copies.counters, entry.geometry.slot_bytes
        if open_end:
            counters["offload_behind_hole_blocks"] += missing
            return
        again = self._copies.blocks.marked(rows, RETURNED)
        refused = self._budget.refused_blocks if self._budget else 0
        admitted = self._policy.admit(again, there, block_bytes, self._clock.now_ns())
        fresh = rows[:admitted][~there[:admitted]]
        if (quota := self._write_behind.quota) is not None:
            fresh = quota.leading(entry, fresh)
        over_budget = self._budget.refused_blocks - refused if self._budget else 0
        counters["offload_over_budget_blocks"] += over_budget
        counters["offload_not_admitted_blocks"] += missing - int(fresh.size) - over_budget
        if fresh.size:
            self._write_behind.add(entry, cls, fresh, self._copies.blocks.table.host_slot[fresh])

    def _there(self, rows: Rows) -> tuple[npt.NDArray[np.bool_], int]:
        """Which rows are on nvme or on their way, and how many leading ones are or could go there now."""
        table = self._copies.blocks.table
        flags = table.flags[rows]
        there = (flags & VISIBLE != 0) & ((flags & TIER_NVME != 0) | self._copies.blocks.marked(rows, OFFLOADING))
        ready = VISIBLE | TIER_HOST
        # One that is scattered over extents is in host, but in no slot that could be written from.
        return there, leading(there | ((flags & ready == ready) & ~self._copies.host.absent(table.host_slot[rows])))
