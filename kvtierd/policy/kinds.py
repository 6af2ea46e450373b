"""What is known of a block when it is used, as one number: its kind. Blocks of a kind are expected to return alike.

Two families. A *private* block has been used by no more requests than its conversation has turns; its kind says how
many turns that are, how many blocks the last of them added, whether the block is the very last of its request (often
partly filled or never asked for again), and how long the pauses between the turns have been. A *shared* block (a system
prompt, a document) has been used more often than that; its kind says how often and in what mean interval.

Each is a bucket of powers of two, so nothing here is fitted to any trace. Where a kind has been seen too rarely to know
about it, its parent stands in: a coarser kind, [private] without pause, then without added blocks, then without turn;
[shared] without interval, then without count.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtierd.index.jit import Word, helper
from kvtierd.policy.ages import bit_length

_TURNS, _ADDED, _ENDS, _PAUSES = 6, 6, 2, 16
_COUNTS, _INTERVALS = 8, 16
_BINS_A_BUCKET = 4
"""Pauses and intervals are told apart by bins of age, four at a time: factors of four."""

SHARED = _TURNS * _ADDED * _ENDS * _PAUSES
"""The first kind of shared blocks; those below are private."""
KINDS = SHARED + _COUNTS * _INTERVALS
_BY_COUNT = KINDS
_BY_ADDED = _BY_COUNT + _COUNTS
_BY_TURN = _BY_ADDED + _TURNS * _ADDED * _ENDS
_BY_END = _BY_TURN + _TURNS * _ENDS
ANY_SHARED = _BY_END + _ENDS
NODES = ANY_SHARED + 1
"""Kinds and their parents; a parent always has the higher number."""
NO_PARENT = -1

Parents = npt.NDArray[np.int32]


def parents() -> Parents:
    """Parent of each kind and of each parent, [NODES] int32."""
    found = np.full(NODES, NO_PARENT, np.int32)
    private = np.arange(SHARED)
    found[private] = _BY_ADDED + private // _PAUSES
    added = np.arange(_TURNS * _ADDED * _ENDS)
    found[_BY_ADDED + added] = _BY_TURN + added // (_ADDED * _ENDS) * _ENDS + added % _ENDS
    turn = np.arange(_TURNS * _ENDS)
    found[_BY_TURN + turn] = _BY_END + turn % _ENDS
    shared = np.arange(_COUNTS * _INTERVALS)
    found[SHARED + shared] = _BY_COUNT + shared // _INTERVALS
    found[_BY_COUNT : _BY_COUNT + _COUNTS] = ANY_SHARED
    return found


@helper
def is_relative(node: Word) -> Word:
    """Whether ages of this kind, or parent, are counted relative to the block's own mean interval."""
    return (node >= SHARED) & (node < _BY_ADDED) | (node == ANY_SHARED)


@helper
def private_kind(turn: Word, added: Word, last: Word, pause_bin: Word) -> Word:
    """Kind of a private block: turns so far (0 at the first), blocks added by this one, whether it is the last block of
    the request, and the bin of the conversation's usual pause (0 when there was none).
    """
    turn_bucket = turn if turn < 4 else (4 if turn < 8 else 5)
    added_bucket = min(_ADDED - 1, bit_length(added))
    kind = (turn_bucket * _ADDED + added_bucket) * _ENDS + last
    return kind * _PAUSES + pause_bin // _BINS_A_BUCKET


@helper
def shared_kind(count: Word, interval_bin: Word) -> Word:
    """Kind of a block used `count` times, at least twice, in a mean interval whose bin is given."""
    count_bucket = min(_COUNTS - 1, bit_length(count) - 2)
    return SHARED + count_bucket * _INTERVALS + interval_bin // _BINS_A_BUCKET


@helper
def uses_doubled(kind: Word) -> Word:
    """How often the uses of a shared kind's blocks have doubled, about: 1 for two or three of them."""
    return 1 + (kind - SHARED) // _INTERVALS


UNKNOWN_KIND = 0
"""Kind of a block of which only its slot is known: private, first turn."""
