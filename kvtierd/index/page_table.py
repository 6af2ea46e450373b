"""The page table: block key to row of the block table, by cuckoo hashing.

`layout` says where everything lies, `probe` looks keys up, `update` inserts and deletes, `displace` finds room among
full buckets, `growth` adds buckets.
"""

from __future__ import annotations

import secrets
from typing import Protocol

import numpy as np

from kvtierd.index import growth, probe, update
from kvtierd.index.block_table import NO_NAMESPACE, ROWS_AHEAD
from kvtierd.index.layout import (
    BUCKETS,
    BUCKETS_MAX,
    COUNT,
    DISPLACED,
    GREW_AT_BUCKETS,
    GREW_AT_COUNT,
    HEADER_LINES,
    K0,
    K1,
    LINE_BYTES,
    LOOKUPS,
    MASK,
    REFUSED,
    SEARCHED_MAX,
    SLOTS,
    SPLITS,
    STASH_PROBES,
    STASHED,
    TOUCHED,
    TOUCHED_MAX,
    Keys,
    Rows,
    Words,
)
from kvtierd.index.memory import Backing, reserve

INITIAL_BUCKETS = 16


class Keyed(Protocol):
    """What holds the keys: [capacity, 8] uint64, of each row its key in words 0..3, its namespace number in bits
    32..47 of word 6."""

    capacity: int
    records: Words


class PageTable:
    """Finds blocks by namespace number and whole 32-byte key; the keys live in `blocks`, the table holds tags and rows.

    It grows with the number of blocks, up to `blocks.capacity`, a bucket at a time. All calls are for one thread (the
    loop); they run without the GIL. `secret` (16 bytes) seeds the hash; only tests give one.
    """

    def __init__(self, blocks: Keyed, secret: bytes | None = None) -> None:
        self._records = blocks.records
        buckets_max = max(INITIAL_BUCKETS, -(-blocks.capacity * growth.LOAD_OF // (growth.LOAD_AT_CAPACITY * SLOTS)))
        self._table = reserve((HEADER_LINES + buckets_max, LINE_BYTES // 8), np.uint64)
        self._backing = Backing(self._table, ROWS_AHEAD // SLOTS)
        head = self._table[0]
        head[[K0, K1]] = np.frombuffer(secret or secrets.token_bytes(16), "<u8")
        head[BUCKETS], head[MASK], head[BUCKETS_MAX] = INITIAL_BUCKETS, INITIAL_BUCKETS - 1, buckets_max

    def __len__(self) -> int:
        """Blocks in the table."""
        return int(self._table[0, COUNT])

    @property
    def words(self) -> Words:
        """The table's memory, as `layout` describes it, for compiled code that works on it."""
        return self._table

    def lookup(self, keys: Keys, namespace: int) -> Rows:
        """Rows of `keys` ([n, 32] uint8, contiguous): [n] int32, -1 where the namespace has no such block."""
        self.check_namespace(namespace)
        rows = np.empty(len(keys), np.int32)
        probe.lookup(self._table, self._records, keys, namespace, rows)
        return rows

    def prefix(self, keys: Keys, namespace: int) -> tuple[int, Rows]:
        """Length of the leading run of present keys, and its rows ([hit] int32).

        It stops at the first miss: whatever the number of keys, at most hit + 32 of them are looked at.
        """
        self.check_namespace(namespace)
        rows = np.empty(len(keys), np.int32)
        hit = probe.prefix(self._table, self._records, keys, namespace, rows)
        return hit, rows[:hit]

    def insert(self, rows: Rows) -> Rows:
        """Insert blocks by row ([n] int32), whose key and namespace are set: [n] int32.

        -1 for a block that is in now. A key that its namespace has already, also from earlier in this batch, is not
        inserted again: its answer is the row that has it. -2 for one that found no place, which takes a full block
        table or some 24 keys that share both buckets: nothing has changed then.
        Raises IndexError for a number that is no row.
        """
        outcome = np.empty(len(rows), np.int32)
        if not update.insert(self._table, self._records, rows, outcome):
            raise self._no_such_row(rows)
        self.backed()
        return outcome

    def backed(self) -> None:
        """Have memory ready ahead of the buckets in use; whoever inserted by itself calls it."""
        self._backing.reached(HEADER_LINES + self._table.item(0, BUCKETS))

    def delete(self, rows: Rows) -> int:
        """Take blocks out by row ([n] int32) before their rows are freed; returns how many were in.

        Raises IndexError for a number that is no row.
        """
        deleted = update.delete(self._table, self._records, rows)
        if deleted < 0:
            raise self._no_such_row(rows)
        return deleted

    @staticmethod
    def check_namespace(namespace: int) -> None:
        """Raise ValueError for what is no namespace number."""
        if not 0 <= namespace < NO_NAMESPACE:
            raise ValueError(f"namespace number is {namespace}; it must be in 0..{NO_NAMESPACE - 1}")

    def _no_such_row(self, rows: Rows) -> IndexError:
        return IndexError(f"rows {rows.min()}..{rows.max()} are not all in a block table of {len(self._records)} rows")

    def bytes_per_block(self) -> float:
        """RAM of the buckets in use per block that is in."""
        return LINE_BYTES * (HEADER_LINES + int(self._table[0, BUCKETS])) / max(1, len(self))

    def stats(self) -> dict[str, int | float]:
        """Gauges and counters by name."""
        head, counters, grew = self._table[0].tolist(), self._table[1].tolist(), self._table[3].tolist()
        return {
            "blocks": head[COUNT],
            "buckets": head[BUCKETS],
            "load": head[COUNT] / (head[BUCKETS] * SLOTS),
            "load_before_growth": grew[GREW_AT_COUNT] / max(1, grew[GREW_AT_BUCKETS] * SLOTS),
            "stashed": head[STASHED],
            "lookups": counters[LOOKUPS],
            "buckets_touched_mean": counters[TOUCHED] / max(1, counters[LOOKUPS]),
            "buckets_touched_max": counters[TOUCHED_MAX],
            "stash_probes": counters[STASH_PROBES],
            "displaced": counters[DISPLACED],
            "splits": counters[SPLITS],
            "refused": counters[REFUSED],
            "searched_max": counters[SEARCHED_MAX],
        }
