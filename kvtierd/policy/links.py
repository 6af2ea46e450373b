"""Doubly linked lists over numbers, in two int32 columns; for compiled code.

A list is circular through a sentinel, which is a number beyond those that can be on a list, so that linking has no
special cases: after `make_list(after, before, s)`, `after[s]` is the front of list `s` and `before[s]` its back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvtierd.index.jit import Word, helper

Column = npt.NDArray[np.int32]


@helper
def make_list(after: Column, before: Column, sentinel: Word) -> None:
    """Make an empty list."""
    after[sentinel] = before[sentinel] = sentinel


@helper
def push_front(after: Column, before: Column, sentinel: Word, node: Word) -> None:
    """Put a node that is on no list at the front."""
    front = after[sentinel]
    after[node], before[node] = front, sentinel
    before[front] = after[sentinel] = node


@helper
def unlink(after: Column, before: Column, node: Word) -> None:
    """Take a node off its list."""
    following, preceding = after[node], before[node]
    after[preceding], before[following] = following, preceding


@helper
def pop_back(after: Column, before: Column, sentinel: Word) -> Word:
    """Take the node at the back off its list, which must not be empty."""
    node = before[sentinel]
    unlink(after, before, node)
    return node


@helper
def leading_run(place: npt.NDArray[Any], blocks: Column, begin: Word, end: Word, resident: Word) -> Word:
    """How many of blocks[begin:end] come before the first whose `place` is not in 1..resident."""
    found = 0
    for index in range(begin, end):
        if place[blocks[index]] < 1 or place[blocks[index]] > resident:
            break
        found += 1
    return found
