"""The index against plain Python: dictionaries and ordered lists that do the same thing slowly."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtierd.index.bitmap import HierarchicalBitmap
from kvtierd.index.block_table import BlockTable
from kvtierd.index.hybrid import HybridIndex
from kvtierd.index.lru import LruLists
from kvtierd.index.page_table import PageTable

NAMESPACES = st.integers(0, 2)
NUMBERS = st.integers(0, 400)
CAPACITY = 300


def keys_of(numbers):
    """Keys that differ in few bits, as no hash would make them."""
    keys = np.zeros((len(numbers), 32), np.uint8)
    for row, number in zip(keys, numbers, strict=True):
        row[number % 32] = number // 32 + 1
    return keys


class Pages(RuleBasedStateMachine):
    """Page table and block table together: rows by (namespace, number of key)."""

    @initialize(seed=st.binary(min_size=16, max_size=16))
    def start(self, seed):
        self.blocks = BlockTable(CAPACITY)
        self.pages = PageTable(self.blocks, seed)
        self.model: dict[tuple[int, int], int] = {}

    @rule(namespace=NAMESPACES, numbers=st.lists(NUMBERS, max_size=90))
    def insert(self, namespace, numbers):
        rows = self.blocks.alloc(len(numbers))
        numbers = numbers[: len(rows)]
        self.blocks.key[rows] = keys_of(numbers)
        self.blocks.namespace[rows] = namespace
        outcome = self.pages.insert(rows)
        for number, row, known in zip(numbers, rows.tolist(), outcome.tolist(), strict=True):
            assert known == self.model.get((namespace, number), -1)
            self.model.setdefault((namespace, number), row)
        self.blocks.free(rows[outcome != -1])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete(self, data):
        gone = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True))
        rows = np.array([self.model.pop(name) for name in gone], np.int32)
        assert self.pages.delete(rows) == len(rows)
        self.blocks.free(rows)

    @rule(namespace=NAMESPACES, numbers=st.lists(NUMBERS, max_size=200))
    def lookup(self, namespace, numbers):
        wanted = [self.model.get((namespace, number), -1) for number in numbers]
        assert self.pages.lookup(keys_of(numbers), namespace).tolist() == wanted
        hit = next((i for i, row in enumerate(wanted) if row < 0), len(wanted))
        found, rows = self.pages.prefix(keys_of(numbers), namespace)
        assert (found, rows.tolist()) == (hit, wanted[:hit])

    @invariant()
    def counts_agree(self):
        stats = self.pages.stats()
        assert len(self.pages) == len(self.blocks) == len(self.model) == stats["blocks"]
        assert stats["buckets_touched_max"] <= 2
        assert stats["load"] <= 0.96


class Recency(RuleBasedStateMachine):
    """LRU lists against ordered dictionaries, coldest first."""

    SLOTS = st.lists(st.integers(0, 39), max_size=12)
    CLASSES = st.integers(0, 2)

    def __init__(self):
        super().__init__()
        self.lists = LruLists(40, 3)
        self.model = [OrderedDict() for _ in range(3)]

    def _here(self, cls, slots):
        """A slot belongs to one class: its number says which, as the tiers' slabs do."""
        return [slot for slot in slots if slot % 3 == cls]

    @rule(cls=CLASSES, slots=SLOTS)
    def push(self, cls, slots):
        slots = self._here(cls, slots)
        self.lists.push(cls, np.array(slots, np.int32))
        for slot in reversed(slots):
            self.model[cls][slot] = None
            self.model[cls].move_to_end(slot)

    @rule(cls=CLASSES, slots=SLOTS)
    def touch(self, cls, slots):
        slots = self._here(cls, slots)
        known = [slot for slot in slots if slot in self.model[cls]]
        assert self.lists.touch(cls, np.array(slots, np.int32)) == len(known)
        for slot in reversed(known):
            self.model[cls].move_to_end(slot)

    @rule(cls=CLASSES, slots=SLOTS)
    def remove(self, cls, slots):
        slots = self._here(cls, slots)
        known = {slot for slot in slots if slot in self.model[cls]}
        assert self.lists.remove(cls, np.array(slots, np.int32)) == len(known)
        for slot in known:
            del self.model[cls][slot]

    @rule(cls=CLASSES, held=st.sets(st.integers(0, 39)), out_max=st.integers(0, 20), scan_max=st.integers(0, 20))
    def victims(self, cls, held, out_max, scan_max):
        holds = np.zeros(40, np.int32)
        holds[list(held)] = 1
        wanted = []
        for slot in list(self.model[cls])[:scan_max]:
            if len(wanted) == out_max:
                break
            if slot in held:
                self.model[cls].move_to_end(slot)
            else:
                wanted.append(slot)
        assert self.lists.victims(cls, holds, out_max, scan_max).tolist() == wanted

    @invariant()
    def order_agrees(self):
        for cls, model in enumerate(self.model):
            assert self.lists.length(cls) == len(model)
            assert self.lists.victims(cls, np.zeros(40, np.int32), 40, 40).tolist() == list(model)


BITS = 5000
"""Positions of the bitmap under test: ten leaves, two levels above them."""
RANGES = st.tuples(st.integers(0, BITS), st.integers(0, BITS)).map(sorted)


class Bits(RuleBasedStateMachine):
    """The hierarchical bitmap against an array of booleans."""

    def __init__(self):
        super().__init__()
        self.bits = HierarchicalBitmap(BITS)
        self.model = np.zeros(BITS, bool)

    @rule(positions=st.lists(st.integers(0, BITS - 1), max_size=40), value=st.booleans())
    def write(self, positions, value):
        changed = len({position for position in positions if self.model[position] != value})
        write = self.bits.set if value else self.bits.clear
        assert write(np.array(positions, np.int64)) == changed
        self.model[positions] = value

    @rule(ends=RANGES, value=st.booleans())
    def write_range(self, ends, value):
        (self.bits.set_range if value else self.bits.clear_range)(*ends)
        self.model[slice(*ends)] = value

    @rule(ends=RANGES, start=st.integers(0, BITS - 1), length=st.sampled_from([1, 2, 5, 64, 65, 400, 513, 2000]))
    def ask(self, ends, start, length):
        assert self.bits.count(*ends) == self.model[slice(*ends)].sum()
        edges = np.flatnonzero(np.diff(np.concatenate([[0], self.model[start:].astype(int), [0]]))) + start
        begins, lengths = edges[::2], edges[1::2] - edges[::2]
        assert self.bits.run_from(start) == next((n for b, n in zip(begins, lengths, strict=True) if b == start), 0)
        assert self.bits.find_first(start) == (begins[0] if begins.size else -1)
        fits = begins[lengths >= length]
        assert self.bits.find_run(length, start) == (fits[0] if fits.size else -1)

    @rule(count=st.sampled_from([0, 1, 2, 31, 32, 64, 65, 400, 513, 2000, BITS + 1]))
    def take(self, count):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], self.model.astype(int), [0]])))
        fits = edges[::2][edges[1::2] - edges[::2] >= max(1, count)]
        wanted = np.arange(fits[0], fits[0] + count) if fits.size else np.flatnonzero(self.model)[:count]
        assert self.bits.take(count).tolist() == wanted.tolist()
        self.model[wanted] = False

    @invariant()
    def bits_agree(self):
        assert self.bits.count() == self.model.sum()
        assert (self.bits.test(np.arange(BITS)) == self.model).all()


class Sequence(RuleBasedStateMachine):
    """The hybrid index against a list of (tokens, place, offset), with bytes that tell whose token a place holds.

    `places` holds the token numbers that lie at each place: a split must leave every token where it can be read.
    """

    def __init__(self):
        super().__init__()
        self.index = HybridIndex(64 * 60)
        self.model: list[tuple[int, int, int]] = []
        self.places: list[list[int]] = []

    def _extents(self):
        return self.index.overlapping(0, self.index.tokens)

    @precondition(lambda self: self.index.tokens <= 64 * 52)
    @rule(granules=st.integers(1, 8))
    def append(self, granules):
        begin = self.index.tokens
        self.places.append(list(range(begin, begin + granules * 64)))
        self.index.append(granules * 64, len(self.places) - 1)
        self.model.append((granules * 64, len(self.places) - 1, 0))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def split(self, data):
        at = data.draw(st.integers(0, len(self.model) - 1))
        tokens, place, offset = self.model[at]
        cuts = data.draw(st.sets(st.sampled_from(range(64, tokens + 64, 64))))
        edges = sorted({0, tokens, *cuts})
        lengths = [end - begin for begin, end in itertools.pairwise(edges)]
        self.index.split(int(self._extents()[at]), np.array(lengths))
        self.model[at : at + 1] = [(n, place, offset + begin) for n, begin in zip(lengths, edges, strict=False)]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def merge(self, data):
        begin = data.draw(st.integers(0, len(self.model) - 1))
        end = data.draw(st.integers(begin + 1, len(self.model)))
        tokens = sum(part[0] for part in self.model[begin:end])
        if tokens > 512:
            return
        if any(place < 0 for _, place, _ in self.model[begin:end]):
            return
        moved = [token for n, place, at in self.model[begin:end] for token in self.places[place][at : at + n]]
        self.places.append(moved)
        self.index.merge(self._extents()[begin:end], len(self.places) - 1)
        self.model[begin:end] = [(tokens, len(self.places) - 1, 0)]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), absent=st.booleans())
    def assign(self, data, absent):
        granules = self.index.tokens // 64
        length = data.draw(st.integers(1, min(8, granules))) * 64
        begins = data.draw(st.lists(st.integers(0, granules - length // 64), max_size=3))
        places = []
        for begin in (granule * 64 for granule in begins):
            places.append(-1 if absent else len(self.places))
            if not absent:
                self.places.append(list(range(begin, begin + length)))
            self._carve(begin, length, places[-1])
        self.index.assign(np.array(begins, np.int64) * 64, length, np.array(places, np.int32))

    def _carve(self, begin, length, place):
        """Replace tokens begin..begin+length-1 by an extent of their own; what is left of others stays where it is."""
        changed, at = [], 0
        for tokens, old, offset in self.model:
            kept = min(tokens, max(0, begin - at)), max(0, at + tokens - max(at, begin + length))
            if kept[0]:
                changed.append((kept[0], old, offset))
            if at <= begin < at + tokens:
                changed.append((length, place, 0))
            if kept[1]:
                changed.append((kept[1], old, offset + tokens - kept[1]))
            at += tokens
        self.model = changed

    @invariant()
    def every_token_is_where_the_index_says(self):
        extents = self._extents()
        placed = self.index.placed(0, self.index.tokens).tolist()
        assert placed == [columns for columns in self.index.describe(extents).tolist() if columns[2] >= 0]
        described = self.index.describe(extents).tolist()
        assert [tuple(columns[1:]) for columns in described] == self.model
        for number, (first, tokens, place, offset) in zip(extents.tolist(), described, strict=True):
            if place >= 0:
                assert self.places[place][offset : offset + tokens] == list(range(first, first + tokens))
            assert set(self.index.locate(np.arange(first, first + tokens)).tolist()) == {number}


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=80, stateful_step_count=40)
TestRecency = Recency.TestCase
TestRecency.settings = settings(max_examples=80, stateful_step_count=40)
TestBits = Bits.TestCase
TestBits.settings = settings(max_examples=80, stateful_step_count=40)
TestSequence = Sequence.TestCase
TestSequence.settings = settings(max_examples=60, stateful_step_count=30)
