"""Where the columns of the tiers are, on boards for compiled functions: one for the host tier, one a slot class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from numba import from_dtype, types

from kvtierd.index.board import (
    Board,
    column_f64,
    column_i32,
    column_i64,
    column_of,
    column_u16,
    column_u32,
    column_u64,
    table_of,
    table_u64,
    tables_of,
)
from kvtierd.policy.ages import BINS
from kvtierd.policy.eviction import CLASSES_MAX
from kvtierd.policy.history import RECORD
from kvtierd.policy.kinds import NODES
from kvtierd.policy.leaf_lists import LISTS, SLOT

if TYPE_CHECKING:
    from kvtierd.gpu.slot_pool import SlotClass
    from kvtierd.policy.return_eviction import ReturnEviction
    from kvtierd.policy.returns import ReturnModel
    from kvtierd.tiers.copies import Copies
    from kvtierd.tiers.demand import Demand

(
    PAGES, RECORDS, WORDS, OCTETS, BLOCK_SUMS, PINS, FREED, COUNTS, LEFT_MS,
    ROW, HOLDS, SHIFT, MASK, RUN_SLAB, RUN_FIRST, RUN_SUMS, GENERATION, NUMBERS, SHARED,
    LEAVES, ENDS, MARKS, CURSORS, LEVELS, HEADS, RING, RETURNED, UNRETURNED, STORY_STATE, PARENTS, WIDTHS,
    SCRATCH, GHOSTS, GHOSTS_AT,
) = range(34)  # fmt: skip
GHOST_STATE, GHOST_KEYS, GHOST_UNITS, GHOST_TIMES, GHOST_LINKS, GHOST_TREE, GHOST_SIZES, GHOST_HITS = range(8)
GHOST_PLACES: Final = 8
GHOSTS_MAX: Final = 3
"""A tier each: gpu, host, nvme."""

FREE_WORDS, FREE_NODES, FREE_LEVELS, FREE_MAX, SUMS, CLASS, SLOT_BYTES, LAYERS, EVICTED, EVICTED_SECRET = range(10)
"""Places on the board of a slot class."""
CLASS_PLACES: Final = 10

pages_of = records_of = column_lines = table_u64
words_of = table_of(types.int32, 16)
moves_of = table_of(types.uint16, 32)
octets_of = table_of(types.uint8, 64)
leaves_of = column_of(from_dtype(SLOT))
ends_of = table_of(types.int32, CLASSES_MAX * LISTS)
marks_of = table_of(types.uint64, 2)
cursors_of = table_of(types.int32, 2)
levels_of = table_of(types.int16, BINS)
ring_of = column_of(from_dtype(RECORD))
ages_of = table_of(types.float32, BINS)
widths_of = table_of(types.float64, BINS)
scratch_of = tables_of(types.float32, NODES, BINS)
nodes_of = table_of(types.int32, 4)
cells_of = table_of(types.uint32, 8)

__all__ = ["column_f64", "column_i32", "column_i64", "column_u16", "column_u32", "column_u64"]


def board_of(copies: Copies, demand: Demand, policy: ReturnEviction, model: ReturnModel) -> Board:
    """Write down the columns of the block table, of the host tier, of its eviction policy and of the ghosts."""
    board = Board(GHOSTS_AT + GHOSTS_MAX * GHOST_PLACES)
    table, host, pool = copies.blocks.table, copies.host, copies.host.pool
    columns: tuple[tuple[int, npt.NDArray[Any]], ...] = (
        (PAGES, copies.blocks.pages.words),
        (RECORDS, table.records),
        (WORDS, table.words),
        (OCTETS, table.octets),
        (BLOCK_SUMS, table.block_sum),
        (PINS, table.pins),
        (FREED, table.freed),
        (COUNTS, table.counts),
        (LEFT_MS, copies.absences.left_ms),
        (ROW, pool.row),
        (HOLDS, pool.holds),
        (RUN_SLAB, pool.run_slab),
        (RUN_FIRST, pool.run_first),
        (RUN_SUMS, pool.run_sums),
        (GENERATION, host.generation),
        (NUMBERS, host.numbers),
        (SHARED, host.shared),
        *zip((LEAVES, ENDS, MARKS, CURSORS), policy.columns, strict=True),
        *zip(range(LEVELS, GHOSTS), model.columns, strict=True),
    )
    for place, column in columns:
        board.put(place, column)
    board.set(SHIFT, pool.shift)
    board.set(MASK, pool.mask)
    put_ghosts(board, demand)
    return board


def put_ghosts(board: Board, demand: Demand) -> None:
    """Write down the ghosts of the tiers that there are now."""
    ghosts = list(demand.ghosts.values())
    board.set(GHOSTS, len(ghosts))
    for number, one in enumerate(ghosts):
        for place, column in enumerate(one.columns):
            board.put(GHOSTS_AT + number * GHOST_PLACES + place, column)


def class_board(cls: SlotClass) -> Board:
    """Write down what belongs to a slot class; `EVICTED`, the keys that left it lately, is the caller's."""
    board = Board(CLASS_PLACES)
    free: tuple[npt.NDArray[Any], ...] = cls.free.columns
    for place, column in zip((FREE_WORDS, FREE_NODES, FREE_LEVELS), free, strict=True):
        board.put(place, column)
    board.put(SUMS, cls.sums.reshape(-1))
    board.put(EVICTED, np.zeros((1, 8), np.uint32))
    for place, number in (
        (FREE_MAX, cls.free.capacity), (CLASS, cls.id), (SLOT_BYTES, cls.slot_bytes), (LAYERS, cls.layers),
    ):  # fmt: skip
        board.set(place, number)
    return board
