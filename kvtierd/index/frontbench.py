"""The three schemes of the adaptive front side by side, and the costs that decide between them.

For `kvtierctl bench index`. Sequences lie in a page table beside many other blocks, as in a daemon, so that a probe
finds its bucket and its record where a daemon's would: not in the processor's cache. Every figure goes through the
front, call overhead included; times are medians of rounds in which the schemes take turns.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from kvtierd.index.crossover import Costs, Scheme
from kvtierd.index.front import POSITIONS_PER_CALL, AdaptiveFront
from kvtierd.index.layout import Keys, Rows
from kvtierd.index.selfbench import filled, random_keys

_T = TypeVar("_T")

BLOCK_TOKENS = 64
NAMESPACE = 9
LOOKUP_POSITIONS = 32
RANGE_POSITIONS = 1000
APPENDED = 32
"""Blocks that a sequence grows by at a time."""
_ASKED = 64
"""Questions of one round."""
_ROOM = 1 << 16
"""Blocks that the sequences under test may have together."""


@dataclasses.dataclass(frozen=True, slots=True)
class SchemeFigures:
    """What one scheme does for a sequence of one length."""

    lookup_ns: float
    """Row of one position, of 32 random ones asked for together."""
    count_ns: float
    """How many of 1,000 positions are present (of all, in a shorter sequence)."""
    extents_ns: float
    """Where the extents of these positions lie."""
    block_bytes: float
    """RAM of a block, its own and what is kept for its sequence."""
    pause_ms: float
    """Longest step while the sequence grows by 32 blocks at a time, each inserted and appended."""


class FrontBench:
    """Sequences over a page table with `others` more blocks."""

    def __init__(self, others: int, rounds: int) -> None:
        self._rounds = rounds
        self._blocks, self._pages = filled(random_keys(others, 11), capacity=others + _ROOM)
        self._rng = np.random.default_rng(12)

    def figures(self, tokens: int) -> dict[Scheme, SchemeFigures]:
        """Measure each scheme on a sequence of `tokens`, all of whose blocks are present but one in a hundred."""
        keys = self._keys(tokens)
        pauses_ms = [self._pause_ms(scheme, keys) for scheme in Scheme]
        front, count, span = self._front(), len(keys), min(len(keys), RANGE_POSITIONS)
        rows = self._insert(front, keys[self._rng.random(count) >= 0.01])
        numbers = [_opened(front, keys, scheme) for scheme in Scheme]
        asked = [self._rng.integers(0, count, LOOKUP_POSITIONS) for _ in range(_ASKED)]
        begins = self._rng.integers(0, count - span + 1, _ASKED).tolist()
        ends = [(begin * BLOCK_TOKENS, (begin + span) * BLOCK_TOKENS) for begin in begins]
        lookups_ns = self._medians_ns(lambda number: [front.rows(number, at) for at in asked], numbers)
        counts_ns = self._medians_ns(lambda number: [front.count(number, at, at + span) for at in begins], numbers)
        extents_ns = self._medians_ns(lambda number: [front.extents(number, *pair) for pair in ends], numbers)
        own_bytes = self._blocks.bytes_per_block() + self._pages.bytes_per_block()
        kept_bytes = [front.nbytes(number) / count for number in numbers]
        self._remove(front, rows)
        return {
            scheme: SchemeFigures(
                lookup_ns=lookups_ns[scheme] / _ASKED / LOOKUP_POSITIONS,
                count_ns=counts_ns[scheme] / _ASKED,
                extents_ns=extents_ns[scheme] / _ASKED,
                block_bytes=own_bytes + kept_bytes[scheme],
                pause_ms=pauses_ms[scheme],
            )
            for scheme in Scheme
        }

    def costs(self, tokens: int) -> Costs:
        """Measure what the choice depends on, with a sequence of `tokens`.

        `positions_min` is 0: it does not follow from times.
        """
        keys, span = self._keys(tokens), min(tokens // BLOCK_TOKENS, RANGE_POSITIONS)
        front, other = self._front(), self._front()
        rows = self._insert(front, keys)
        numbers = [_opened(front, keys, scheme) for scheme in (Scheme.CUCKOO, Scheme.BITMAP)]
        begins = self._rng.integers(0, len(keys) - span + 1, _ASKED).tolist()
        probed_ns, tracked_ns = self._medians_ns(
            lambda number: [front.count(number, at, at + span) for at in begins], numbers
        )
        told_ns, untold_ns = self._medians_ns(lambda which: _out_and_in(which, rows[:span]), [front, other])
        front.close(numbers[0])
        short = _opened(other, keys[:1], Scheme.CUCKOO)
        long = _opened(other, keys, Scheme.CUCKOO)
        moved_ns, begun_ns = self._medians_ns(lambda number: _to_and_fro(other, number), [long, short])
        self._remove(front, rows)
        return Costs(
            probe_ns=(probed_ns - tracked_ns) / _ASKED / span,
            track_ns=(moved_ns - begun_ns) / len(keys),
            begin_ns=begun_ns,
            update_ns=(told_ns - untold_ns) / 2 / span,
            positions_min=0,
        )

    def _front(self) -> AdaptiveFront:
        return AdaptiveFront(self._blocks, self._pages)

    def _keys(self, tokens: int) -> Keys:
        return random_keys(tokens // BLOCK_TOKENS, int(self._rng.integers(1 << 30)))

    def _insert(self, front: AdaptiveFront, keys: Keys) -> Rows:
        rows = self._blocks.alloc(len(keys))
        self._blocks.key[rows], self._blocks.namespace[rows] = keys, NAMESPACE
        if (front.insert(rows) != -1).any():
            raise RuntimeError(f"the page table refused one of {len(keys)} keys beside {len(self._pages)}")
        return rows

    def _remove(self, front: AdaptiveFront, rows: Rows) -> None:
        front.delete(rows)
        self._blocks.free(rows)

    def _medians_ns(self, work: Callable[[_T], object], whats: Sequence[_T]) -> list[float]:
        """Nanoseconds of `work` on each of `whats`, which take turns."""
        rounds = []
        for _ in range(self._rounds):
            times = []
            for what in whats:
                begin = time.perf_counter_ns()
                work(what)
                times.append(time.perf_counter_ns() - begin)
            rounds.append(times)
        return [float(median) for median in np.median(rounds, axis=0)]

    def _pause_ms(self, scheme: Scheme, keys: Keys) -> float:
        """Longest step of growing to `keys`, each at its fastest of all rounds."""
        rounds = []
        for _ in range(self._rounds):
            front, step_ns, rows = self._front(), [], []
            number = front.open(NAMESPACE, BLOCK_TOKENS, keys[:0])
            front.want(number, scheme)
            for at in range(0, len(keys), APPENDED):
                begin = time.perf_counter_ns()
                rows.append(self._insert(front, keys[at : at + APPENDED]))
                front.append(number, keys[at : at + APPENDED])
                step_ns.append(time.perf_counter_ns() - begin)
            if front.scheme(number) is not scheme:
                raise RuntimeError(f"a sequence of {len(keys)} blocks is {front.scheme(number)!r}, not {scheme!r}")
            self._remove(front, np.concatenate(rows))
            rounds.append(step_ns)
        return float(np.min(rounds, axis=0).max()) / 1e6


def _opened(front: AdaptiveFront, keys: Keys, scheme: Scheme) -> int:
    number = front.open(NAMESPACE, BLOCK_TOKENS, keys)
    _move(front, number, scheme)
    return number


def _move(front: AdaptiveFront, number: int, scheme: Scheme) -> None:
    """Give a sequence a scheme, in steps as large as a call's."""
    front.want(number, scheme)
    while front.step(POSITIONS_PER_CALL):
        pass


def _to_and_fro(front: AdaptiveFront, number: int) -> None:
    _move(front, number, Scheme.BITMAP)
    _move(front, number, Scheme.CUCKOO)


def _out_and_in(front: AdaptiveFront, rows: Rows) -> None:
    """Delete and insert blocks, in batches as large as a sequence grows by."""
    for change in (front.delete, front.insert):
        for at in range(0, rows.size, APPENDED):
            change(rows[at : at + APPENDED])
