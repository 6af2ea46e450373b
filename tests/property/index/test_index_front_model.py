"""The adaptive front against plain Python: present keys by name and granules one by one, switched at every step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtierd.index.block_table import BlockTable
from kvtierd.index.crossover import Costs, Scheme
from kvtierd.index.front import AdaptiveFront
from kvtierd.index.page_table import PageTable

EAGER = Costs(probe_ns=1, track_ns=1, begin_ns=2, update_ns=3, positions_min=4)
"""Switches to and fro after a few questions and changes."""
NAMESPACES = st.integers(0, 1)
NUMBERS = st.one_of(
    st.builds(
        lambda begin, count: list(range(begin, begin + count)), st.sampled_from([0, 0, 7, 30]), st.integers(0, 60)
    ),
    st.lists(st.integers(0, 90), max_size=20),
)
"""Keys as prefixes have them, and in any order, also more than once."""
WATCHED_MAX = 110
"""Less than all sequences together may have, so that the watch gets full."""


def keys_of(numbers):
    keys = np.zeros((len(numbers), 32), np.uint8)
    keys[:, 0] = numbers
    return keys


class Model:
    """A sequence: numbers of its keys, and for each granule of 64 tokens of a present block (mark of its extent, place,
    granule within the place)."""

    marks = itertools.count()

    def __init__(self, namespace, block_tokens, numbers):
        self.namespace, self.block_tokens, self.numbers = namespace, block_tokens, numbers
        self.granules = {}

    def place(self, position, row):
        """The block at a position is at a row now, as one extent; None for nowhere."""
        if self.block_tokens % 64:
            return
        mark, size = next(self.marks), self.block_tokens // 64
        for index in range(size):
            self.granules.pop(position * size + index, None)
            if row is not None:
                self.granules[position * size + index] = (mark, row, index)

    def extents(self):
        """[first token, tokens, place, offset] of each, in order."""
        found = []
        numbered = enumerate(sorted(self.granules.items()))
        for _, group in itertools.groupby(numbered, lambda item: (item[1][1][0], item[1][0] - item[0])):
            parts = [part for _, part in group]
            found.append([parts[0][0] * 64, len(parts) * 64, parts[0][1][1], parts[0][1][2] * 64])
        return found

    def relabel(self, first, count, place=None):
        """Granules first..first+count-1 become one extent, where they were or at a place."""
        mark = next(self.marks)
        for index in range(count):
            _, old, offset = self.granules[first + index]
            self.granules[first + index] = (mark, *((old, offset) if place is None else (place, index)))


class Front(RuleBasedStateMachine):
    @initialize(per_call=st.sampled_from([0, 1, 3, 64]))
    def start(self, per_call):
        self.blocks = BlockTable(400)
        self.pages = PageTable(self.blocks)
        self.front = AdaptiveFront(
            self.blocks, self.pages, watched_max=WATCHED_MAX, costs=EAGER, positions_per_call=per_call
        )
        self.present: dict[tuple[int, int], int] = {}
        self.open: dict[int, Model] = {}
        self.kept: list[tuple[np.ndarray, list]] = []

    # What happens to blocks.

    @rule(namespace=NAMESPACES, numbers=NUMBERS)
    def insert(self, namespace, numbers):
        rows = self.blocks.alloc(len(numbers))
        self.blocks.key[rows], self.blocks.namespace[rows] = keys_of(numbers), namespace
        outcome = self.front.insert(rows)
        for number, row, known in zip(numbers, rows.tolist(), outcome.tolist(), strict=True):
            assert known == self.present.get((namespace, number), -1)
            if known == -1:
                self.present[namespace, number] = row
                self._changed(namespace, number, row)
        known = rows[outcome != -1]
        assert self.front.delete(known) == 0  # Another row has their key: nothing went.
        self.blocks.free(known)

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def delete(self, data):
        gone = data.draw(st.lists(st.sampled_from(sorted(self.present)), unique=True, max_size=30))
        rows = np.array([self.present.pop(name) for name in gone], np.int32)
        assert self.front.delete(rows) == len(rows)
        assert self.front.delete(rows) == 0
        self.blocks.free(rows)
        for namespace, number in gone:
            self._changed(namespace, number, None)

    def _changed(self, namespace, number, row):
        for model in self.open.values():
            for position, mine in enumerate(model.numbers):
                if (model.namespace, mine) == (namespace, number):
                    model.place(position, row)

    # What happens to sequences.

    @precondition(lambda self: len(self.open) < 4)
    @rule(
        namespace=NAMESPACES,
        block_tokens=st.sampled_from([32, 64, 128, 512]),
        numbers=NUMBERS,
    )
    def open_one(self, namespace, block_tokens, numbers):
        number = self.front.open(namespace, block_tokens, keys_of(numbers))
        self.open[number] = Model(namespace, block_tokens, [])
        self._extend(self.open[number], numbers)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), numbers=NUMBERS)
    def append(self, data, numbers):
        number = data.draw(st.sampled_from(sorted(self.open)))
        self.front.append(number, keys_of(numbers))
        self._extend(self.open[number], numbers)

    def _extend(self, model, numbers):
        for number in numbers:
            model.numbers.append(number)
            if (row := self.present.get((model.namespace, number))) is not None:
                model.place(len(model.numbers) - 1, row)

    @precondition(lambda self: len(self.open) > 2)
    @rule(data=st.data())
    def close(self, data):
        number = data.draw(st.sampled_from(sorted(self.open)))
        self.front.close(number)
        del self.open[number]
        with pytest.raises(ValueError, match=f"sequence {number} is not open"):
            self.front.run(number)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), scheme=st.sampled_from([None, *Scheme]))
    def want(self, data, scheme):
        number = data.draw(st.sampled_from(sorted(self.open)))
        if scheme is Scheme.HYBRID and self.open[number].block_tokens % 64:
            with pytest.raises(ValueError, match="do not fit the granules"):
                self.front.want(number, scheme)
        elif scheme is not Scheme.HYBRID and self.front._switches.of(number).sequence.mixed:
            with pytest.raises(ValueError, match="only a hybrid index knows"):
                self.front.want(number, scheme)
        else:
            self.front.want(number, scheme)

    @rule(positions=st.sampled_from([1, 2, 7, 40, 1000]))
    def step(self, positions):
        self.front.step(positions)

    @precondition(lambda self: any(model.extents() for model in self.open.values()))
    @rule(data=st.data())
    def split(self, data):
        number = data.draw(st.sampled_from([n for n, model in self.open.items() if model.extents()]))
        model = self.open[number]
        first, tokens, _, _ = data.draw(st.sampled_from(model.extents()))
        cuts = data.draw(st.sets(st.sampled_from(range(64, tokens + 64, 64))))
        edges = sorted({0, tokens, *cuts})
        token = first + data.draw(st.integers(0, tokens - 1))
        if self.front.split(number, token, np.diff(edges)):
            for begin, end in itertools.pairwise(edges):
                model.relabel((first + begin) // 64, (end - begin) // 64)

    @precondition(lambda self: any(model.extents() for model in self.open.values()))
    @rule(data=st.data(), place=st.integers(1000, 2000))
    def merge(self, data, place):
        number = data.draw(st.sampled_from([n for n, model in self.open.items() if model.extents()]))
        model = self.open[number]
        extents = model.extents()
        begin = data.draw(st.integers(0, len(extents) - 1))
        parts = extents[begin : data.draw(st.integers(begin + 1, len(extents)))]
        first, end = parts[0][0], parts[-1][0] + parts[-1][1]
        if end - first != sum(part[1] for part in parts) or end - first > 512:
            return
        if self.front.merge(number, first, end, place):
            model.relabel(first // 64, (end - first) // 64, place)

    # What the front says, at whatever point its switches are.

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def ask(self, data):
        number = data.draw(st.sampled_from(sorted(self.open)))
        model = self.open[number]
        wanted, length = self._rows(model), len(model.numbers)
        begin = data.draw(st.integers(0, length))
        end = data.draw(st.integers(begin, length))
        part = wanted[begin:end]
        assert self.front.count(number, begin, end) == sum(row >= 0 for row in part)
        assert self.front.holes(number, begin, end).tolist() == [begin + i for i, row in enumerate(part) if row < 0]
        assert self.front.run(number, begin) == len(list(itertools.takewhile(lambda row: row >= 0, wanted[begin:])))
        if length:
            positions = data.draw(st.lists(st.integers(0, length - 1), max_size=20))
            assert self.front.rows(number, np.array(positions, np.int64)).tolist() == [wanted[p] for p in positions]
        if model.block_tokens % 64 == 0:
            first = data.draw(st.integers(0, length * model.block_tokens))
            last = data.draw(st.integers(first, length * model.block_tokens))
            overlap = [
                part for part in model.extents() if first < last and part[0] < last and part[0] + part[1] > first
            ]
            answer = self.front.extents(number, first, last)
            assert answer.tolist() == overlap
            self.kept.append((answer, overlap))

    def _rows(self, model):
        return [self.present.get((model.namespace, number), -1) for number in model.numbers]

    @invariant()
    def all_is_as_the_page_table_says(self):
        for number, model in self.open.items():
            wanted, length = self._rows(model), len(model.numbers)
            assert self.front.length(number) == length
            assert self.front.rows(number, np.arange(length)).tolist() == wanted
            assert self.front.count(number) == sum(row >= 0 for row in wanted)
            if model.block_tokens % 64 == 0:
                assert self.front.extents(number, 0, length * model.block_tokens).tolist() == model.extents()
        assert len(self.pages) == len(self.present)

    @invariant()
    def what_readers_were_given_is_theirs(self):
        for answer, copy in self.kept:
            assert answer.tolist() == copy

    @invariant()
    def nothing_is_watched_for_nobody(self):
        entries = self.front._switches._entries
        assert len(self.front._watch) == sum(entry.sequence.tracked for entry in entries.values()) <= WATCHED_MAX
        assert set(self.open) <= set(entries)
        for entry in entries.values():
            assert entry.sequence.extended <= entry.sequence.tracked <= entry.sequence.length

    def _settle(self):
        while self.front.step(50):
            pass

    def teardown(self):
        if not hasattr(self, "front"):
            return
        self._settle()
        for number, model in self.open.items():
            target = self.front._switches.of(number).target
            if model.numbers and len(self.front._watch) < WATCHED_MAX:
                assert self.front.scheme(number) is target
        for number in self.open:
            self.front.close(number)
        self._settle()
        assert self.front.stats()["sequences"] == self.front.stats()["positions_watched"] == 0
        assert len(self.front._watch._pages) == 0


TestFront = Front.TestCase
TestFront.settings = settings(max_examples=150, stateful_step_count=60)
