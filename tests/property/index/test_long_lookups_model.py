"""Lookups of long prefixes through the adaptive front answer as a dict would, while it switches and blocks change."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtierd.index.block_table import BlockTable
from kvtierd.index.long_lookups import LONG_KEYS, LongLookups
from kvtierd.index.page_table import PageTable

SEQUENCES = 3
LENGTH = LONG_KEYS + 400


def keys_of(seed, count):
    return np.random.default_rng(seed).integers(0, 256, (count, 32), np.uint8)


class LongLife(RuleBasedStateMachine):
    @initialize(shared=st.integers(0, LENGTH))
    def begin(self, shared):
        self.table = BlockTable(8192)
        self.long = LongLookups(self.table, PageTable(self.table))
        trunk = keys_of(0, LENGTH)
        self.sequences = [trunk.copy() for _ in range(SEQUENCES)]
        for i in range(1, SEQUENCES):  # They share a prefix, and may share the key that names them.
            self.sequences[i][shared:] = keys_of(i, LENGTH - shared)
        self.rows: dict[bytes, int] = {}
        for keys in self.sequences:
            self.insert(keys)

    def insert(self, keys):
        fresh = [key for key in np.unique(keys, axis=0) if key.tobytes() not in self.rows]
        rows = self.table.alloc(len(fresh))
        if not fresh:
            return
        self.table.key[rows], self.table.namespace[rows] = np.stack(fresh), 7
        assert (self.long.front.insert(rows) == -1).all()
        self.rows |= {key.tobytes(): row for key, row in zip(fresh, rows.tolist(), strict=True)}

    @rule(which=st.integers(0, SEQUENCES - 1), count=st.integers(LONG_KEYS, LENGTH), often=st.sampled_from([1, 3, 60]))
    def look_up(self, which, count, often):
        keys = np.ascontiguousarray(self.sequences[which][:count])
        wanted = []
        for key in keys:
            row = self.rows.get(key.tobytes())
            if row is None:
                break
            wanted.append(row)
        for _ in range(often):
            assert self.long.prefix(keys, 7).tolist() == wanted

    @rule(which=st.integers(0, SEQUENCES - 1), mixed=st.integers(1, LENGTH - 1))
    def look_up_keys_that_are_no_chain(self, which, mixed):
        keys = self.sequences[which].copy()
        keys[mixed:] = self.sequences[0][mixed:]
        keys[mixed - 1] = 1
        found = self.long.prefix(keys, 7)
        assert found.size <= mixed - 1
        assert [self.rows[key.tobytes()] for key in keys[: found.size]] == found.tolist()

    @rule(which=st.integers(0, SEQUENCES - 1), at=st.integers(0, LENGTH - 1), count=st.integers(1, 50))
    def delete(self, which, at, count):
        names = {key.tobytes() for key in self.sequences[which][at : at + count]} & set(self.rows)
        rows = np.array([self.rows.pop(name) for name in names], np.int32)
        if rows.size:
            assert self.long.front.delete(rows) == rows.size
            self.table.free(rows)

    @rule(which=st.integers(0, SEQUENCES - 1), at=st.integers(0, LENGTH - 1), count=st.integers(1, 200))
    def store(self, which, at, count):
        self.insert(self.sequences[which][at : at + count])

    @rule(positions=st.integers(1, 500))
    def step(self, positions):
        self.long.front.step(positions)

    @invariant()
    def no_more_is_watched_than_there_is(self):
        assert self.long.stats()["front_positions_watched"] <= SEQUENCES * LENGTH


LongLife.TestCase.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
TestLongLife = LongLife.TestCase


def test_a_long_prefix_that_is_asked_about_again_and_again_is_tracked():
    table = BlockTable(8192)
    long = LongLookups(table, PageTable(table))
    keys = keys_of(1, 4096)
    rows = table.alloc(4096)
    table.key[rows], table.namespace[rows] = keys, 1
    long.front.insert(rows)
    for _ in range(200):
        assert (long.prefix(keys, 1) == rows).all()
    stats = long.stats()
    assert stats["front_positions_watched"] == 4096
    assert stats["front_switches_to_bitmap"] == 1
    long.front.delete(rows[3000:3001])
    assert long.prefix(keys, 1).size == 3000


def test_what_is_asked_about_once_costs_no_copy_of_its_keys():
    table = BlockTable(2048)
    long = LongLookups(table, PageTable(table))
    keys = keys_of(1, 1000)
    rows = table.alloc(1000)
    table.key[rows], table.namespace[rows] = keys, 1
    long.front.insert(rows)
    long.prefix(keys, 1)
    assert long.stats()["front_sequences"] == 0
