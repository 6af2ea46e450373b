"""Rows of block numbers against plain lists: the runs of a table are its rows as a tree, each block in one of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.connectors.offloaded_table import BlockTable

Step = tuple[str, list[int]]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.integers(0, 19), min_size=1, max_size=3)),
        st.tuples(st.just("select"), st.lists(st.integers(0, 7), min_size=1, max_size=5)),
        st.tuples(st.just("truncate"), st.lists(st.integers(0, 25), min_size=5, max_size=5)),
        st.tuples(st.just("share"), st.lists(st.integers(1, 3), min_size=1, max_size=1)),
    ),
    max_size=20,
)


class Model:
    """Rows as lists, and a number for every new block."""

    def __init__(self, rows: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self.next = 0

    def new(self, count: int) -> list[int]:
        self.next += count
        return list(range(self.next - count, self.next))

    def apply(self, table: BlockTable, step: Step) -> None:
        what, numbers = step
        if what == "append":  # to some rows a block of their own each
            for row in dict.fromkeys(number % len(self.rows) for number in numbers):
                self._append(table, row, self.new(len(numbers)))
        elif what == "share":  # to all rows with the past of row 0 the same blocks
            blocks = self.new(numbers[0])
            for row in [i for i, blocks_of in enumerate(self.rows) if blocks_of == self.rows[0]]:
                self._append(table, row, blocks)
        elif what == "select":
            chosen = [number % len(self.rows) for number in numbers]
            table.select(np.array(chosen))
            self.rows = [list(self.rows[row]) for row in chosen]
        else:
            counts = (numbers * len(self.rows))[: len(self.rows)]
            table.truncate(np.array(counts))
            self.rows = [blocks[:count] for blocks, count in zip(self.rows, counts, strict=True)]

    def _append(self, table: BlockTable, row: int, blocks: list[int]) -> None:
        table.append(row, np.array(blocks))
        self.rows[row] += blocks


@given(st.integers(1, 4), steps)
def test_runs_are_the_rows_as_a_tree(rows: int, todo: list[Step]) -> None:
    table, model = BlockTable(rows), Model(rows)
    for step in todo:
        before = table.copy()
        kept = [list(blocks) for blocks in model.rows]
        model.apply(table, step)
        assert [before.of_row(row).tolist() for row in range(len(kept))] == kept
        check(table, model)


def check(table: BlockTable, model: Model) -> None:
    assert [table.of_row(row).tolist() for row in range(len(model.rows))] == model.rows
    assert table.is_empty == (not any(model.rows))
    everything = sorted({block for blocks in model.rows for block in blocks})
    assert table.live().tolist() == everything
    runs = table.runs()
    assert sorted(block for run in runs for block in run.blocks.tolist()) == everything, "a block in two runs, or none"
    for row, blocks in enumerate(model.rows):
        mine = [run for run in runs if row in run.rows]
        assert sorted(block for run in mine for block in run.blocks.tolist()) == sorted(blocks)
        for run in mine:
            at = blocks.index(int(run.blocks[0]))
            assert run.blocks.tolist() == blocks[at : at + len(run.blocks)]
    for one in runs:  # as few as can be: a run goes on until its rows part or one ends
        last = int(one.blocks[-1])
        following = {tuple(blocks[blocks.index(last) + 1 :][:1]) for blocks in (model.rows[row] for row in one.rows)}
        assert len(following) > 1 or following == {()}
