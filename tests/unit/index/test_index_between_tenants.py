"""A lookup of a key that another namespace has does the work of one that nobody has: there is nothing to time."""

from __future__ import annotations

import numpy as np
import pytest

from kvtierd.index.block_table import BlockTable
from kvtierd.index.layout import LOOKUPS, ROWS_AT, STASH_PROBES, STASHED, TOUCHED
from kvtierd.index.page_table import PageTable

SECRET = bytes(range(16))
MINE, OTHERS = 1, 2
FILLED = 400
COUNT = 16
"""Keys of a question: fewer than a chunk, so that all candidates of a call are left in the scratch."""


def keys(first: int, count: int) -> np.ndarray:
    return np.random.default_rng(first).integers(0, 256, (count, 32), np.uint8)


def table_with(others: np.ndarray) -> PageTable:
    """Blocks of mine, the same in every table, and of `others`, of which there are equally many each time."""
    blocks = BlockTable(4096)
    pages = PageTable(blocks, SECRET)
    for space, of_space in ((MINE, keys(1, FILLED)), (OTHERS, others)):
        rows = blocks.alloc(len(of_space))
        blocks.key[rows], blocks.namespace[rows] = of_space, space
        assert (pages.insert(rows) == -1).all()
    return pages


def work(pages: PageTable, asked: np.ndarray, way: str) -> dict[str, object]:
    """What a question of mine costs, and which records it looked at."""
    before = pages.words[1].copy()
    found = pages.lookup(asked, MINE) if way == "lookup" else pages.prefix(asked, MINE)[1]
    counters = (pages.words[1] - before).tolist()
    candidates = pages.words.reshape(-1).view(np.int32)[ROWS_AT // 4 : ROWS_AT // 4 + len(asked)]
    return {
        "answer": found.tolist(),
        "keys": counters[LOOKUPS],
        "buckets": counters[TOUCHED],
        "stash": counters[STASH_PROBES],
        "records": np.count_nonzero(candidates >= 0),
    }


@pytest.mark.parametrize("way", ["lookup", "prefix"])
def test_case_09_another_tenants_key_is_the_work_of_one_that_nobody_has(way: str) -> None:
    asked, elsewhere = keys(2, FILLED), keys(3, FILLED)
    there, absent = table_with(asked), table_with(elsewhere)
    for begin in range(0, FILLED - COUNT, COUNT):
        question = asked[begin : begin + COUNT]
        one, other = work(there, question, way), work(absent, question, way)
        assert one == other, "the same buckets, the same stash, the same records"
        assert one["records"] == 0, "no record of the other tenant is compared, or brought near"
        assert one["keys"] <= one["buckets"] <= 2 * one["keys"]
    assert (there.lookup(asked, OTHERS) >= 0).all(), "they are there for whoever owns them"


def test_case_09_a_stash_in_use_costs_both_the_same() -> None:
    """Keys that find no bucket lie in the stash, which every miss then looks through."""
    asked = keys(4, FILLED)
    there, absent = table_with(asked), table_with(keys(5, FILLED))
    for pages in (there, absent):
        pages.words[0, STASHED] += np.uint64(1)  # as if one entry were there: the way that misses take
    one, other = work(there, asked[:COUNT], "lookup"), work(absent, asked[:COUNT], "lookup")
    assert one == other
    assert one["stash"] == COUNT
