"""The summaries of the hierarchical bitmap, and how they are kept in step with the bits.

A leaf covers 512 bits (one cache line of words), a node above it eight nodes below. Each has four numbers (int32): the
length of the run of set bits at its beginning, the longest run in it, the run at its end, and how many bits are set.
These are enough to combine eight neighbours into one, and to find a run of any length without reading the bits that
cannot hold it. Source of the summaries: the page allocator of Go's runtime (A. Clements, M. Knyszek, 2019), which
keeps the first three of free pages.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from kvtierd.index.intrinsics import count_bits, leading_zeros, lowest_bit
from kvtierd.index.jit import Word, helper, subroutine

WORD_BITS = 64
LEAF_WORDS = 8
LEAF_BITS = WORD_BITS * LEAF_WORDS
FAN_OUT = 8

FIRST, LONGEST, LAST, SET = range(4)
"""Columns of a node."""

WORDS = types.uint64[::1]
NODES = types.int32[:, ::1]
LEVELS = types.int64[::1]
Words = npt.NDArray[np.uint64]
Nodes = npt.NDArray[np.int32]
Levels = npt.NDArray[np.int64]
"""First node of each level; leaves are level 0."""

U64 = np.uint64
ALL = U64(0xFFFFFFFFFFFFFFFF)


@helper
def run_within(word: Word, at_least: Word) -> Word:
    """Longest run of set bits in a word, or `at_least` if none is longer."""
    longest, rest = at_least, word
    for _ in range(at_least):
        rest &= rest >> U64(1)
    while rest:
        rest &= rest >> U64(1)
        longest += 1
    return longest


@subroutine
def _summarise_leaf(words: Words, leaf: Word) -> Word:
    """First run, longest run, last run and number of set bits of 512 bits."""
    first, longest, run, count = -1, 0, 0, 0
    for index in range(leaf * LEAF_WORDS, (leaf + 1) * LEAF_WORDS):
        word = words[index]
        if word == ALL:
            run, count = run + WORD_BITS, count + WORD_BITS
            continue
        run += lowest_bit(~word)
        if first < 0:
            first = run
        longest = run_within(word, max(longest, run))
        run, count = leading_zeros(~word), count + count_bits(word)
    if first < 0:
        first = run
    return first, max(longest, run), run, count


@subroutine
def _combine(nodes: Nodes, begin: Word, span: Word) -> Word:
    """The same of eight neighbours from node `begin` on, of `span` bits each."""
    first, longest, run, count = -1, 0, 0, 0
    for child in range(begin, begin + FAN_OUT):
        count += nodes[child, SET]
        if nodes[child, FIRST] == span:
            run += span
            continue
        run += nodes[child, FIRST]
        if first < 0:
            first = run
        longest = max(longest, run, nodes[child, LONGEST])
        run = nodes[child, LAST]
    if first < 0:
        first = run
    return first, max(longest, run), run, count


@helper
def _store(nodes: Nodes, node: Word, summary: Word) -> Word:
    """Write a summary; returns whether its runs have changed."""
    first, longest, last, count = summary
    changed = nodes[node, FIRST] != first or nodes[node, LONGEST] != longest or nodes[node, LAST] != last
    nodes[node, FIRST], nodes[node, LONGEST], nodes[node, LAST], nodes[node, SET] = first, longest, last, count
    return changed


@subroutine
def refresh(words: Words, nodes: Nodes, levels: Levels, leaf: Word) -> None:
    """Bring the summaries above a leaf in step with its bits.

    Where a node's runs are as before, those above it are too, and only their counts change.
    """
    before = nodes[leaf, SET]
    changed = _store(nodes, leaf, _summarise_leaf(words, leaf))
    added = nodes[leaf, SET] - before
    index, span = np.int64(leaf), np.int64(LEAF_BITS)
    for level in range(1, levels.size):
        index //= FAN_OUT
        node = levels[level] + index
        if changed:
            changed = _store(nodes, node, _combine(nodes, levels[level - 1] + index * FAN_OUT, span))
        else:
            nodes[node, SET] += added
        span *= FAN_OUT


@subroutine
def rebuild(words: Words, nodes: Nodes, levels: Levels, begin_leaf: Word, end_leaf: Word) -> None:
    """The same for leaves begin..end-1 at once: every node above them is computed once."""
    for leaf in range(begin_leaf, end_leaf):
        _store(nodes, leaf, _summarise_leaf(words, leaf))
    begin, end, span = np.int64(begin_leaf), np.int64(end_leaf), np.int64(LEAF_BITS)
    for level in range(1, levels.size):
        begin, end = begin // FAN_OUT, (end + FAN_OUT - 1) // FAN_OUT
        for index in range(begin, end):
            _store(nodes, levels[level] + index, _combine(nodes, levels[level - 1] + index * FAN_OUT, span))
        span *= FAN_OUT


@helper
def mask_from(bit: Word) -> Word:
    """Bits `bit`..63 of a word."""
    return ALL << U64(bit)


@helper
def mask_below(bit: Word) -> Word:
    """Bits 0..bit-1 of a word; bit 1..64."""
    return ALL >> U64(WORD_BITS - bit)
