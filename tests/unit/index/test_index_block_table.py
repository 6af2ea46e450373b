from __future__ import annotations

import numpy as np
import pytest

from kvtierd.index.block_table import NO_NAMESPACE, RECORD, BlockTable

COLUMNS = ("namespace", "extent_page", "heat", "pins", "flags", "marks", "moves", "last_access_s")


def test_a_new_row_is_a_block_that_is_nowhere():
    blocks = BlockTable(10)
    rows = blocks.alloc(3)
    assert rows.dtype == np.int32
    assert len(set(rows.tolist())) == 3
    assert len(blocks) == 3
    for name in ("host_slot", "gpu_slot", "segment"):
        assert (getattr(blocks, name)[rows] == -1).all()
    for name in COLUMNS:
        assert (getattr(blocks, name)[rows] == 0).all()


def test_a_row_used_again_shows_nothing_of_its_past():
    blocks = BlockTable(4)
    rows = blocks.alloc(4)
    blocks.key[rows] = 255
    for name in (*COLUMNS, "host_slot", "gpu_slot", "segment"):
        getattr(blocks, name)[rows] = 7
    blocks.free(rows)
    assert (blocks.namespace[rows] == NO_NAMESPACE).all()
    again = blocks.alloc(4)
    assert (blocks.key[again] == 0).all()
    assert (blocks.host_slot[again] == -1).all()
    assert not any(getattr(blocks, name)[again].any() for name in COLUMNS)


def test_columns_do_not_overlap():
    blocks = BlockTable(3)
    blocks.alloc(3)
    values = {name: np.iinfo(getattr(blocks, name).dtype).max for name in RECORD.names if name != "key"}
    for name, value in values.items():
        getattr(blocks, name)[1] = value
    blocks.key[1] = 0xAB
    for name, value in values.items():
        untouched = -1 if name in {"host_slot", "gpu_slot", "segment", "next_row"} else 0
        assert getattr(blocks, name).tolist() == [untouched, value, untouched]
    assert blocks.key[:, 0].tolist() == [0, 0xAB, 0]


def test_a_full_table_gives_what_it_has():
    blocks = BlockTable(5)
    assert len(blocks.alloc(3)) == 3
    assert len(blocks.alloc(3)) == 2
    assert len(blocks.alloc(1)) == 0
    blocks.free(np.array([1], np.int32))
    assert blocks.alloc(9).tolist() == [1]


@pytest.mark.parametrize("row", [-1, 2, 5, 1 << 30, -(1 << 31)])
def test_freeing_a_row_that_is_not_in_use_is_refused(row):
    blocks = BlockTable(5)
    blocks.alloc(2)
    with pytest.raises(ValueError, match=f"row {row} is not in use"):
        blocks.free(np.array([row], np.int32))
    assert len(blocks) == 2


def test_freeing_twice_is_refused():
    blocks = BlockTable(5)
    rows = blocks.alloc(2)
    with pytest.raises(ValueError, match="is not in use"):
        blocks.free(np.array([rows[0], rows[0]], np.int32))
    assert len(blocks) == 1


@pytest.mark.parametrize("capacity", [0, -1, (1 << 30) + 1])
def test_a_capacity_out_of_range_is_named(capacity):
    with pytest.raises(ValueError, match=f"capacity is {capacity}"):
        BlockTable(capacity)


def test_passes_over_the_table_can_end_at_used_rows():
    blocks = BlockTable(100)
    rows = blocks.alloc(7)
    blocks.free(rows[:5])
    blocks.alloc(2)
    assert blocks.used_rows == 7


def test_a_large_table_takes_memory_only_as_it_is_used():
    blocks = BlockTable(1 << 28)
    rows = blocks.alloc(1000)
    blocks.key[rows] = 1
    assert blocks.bytes_per_block() == 78
    assert blocks.records.nbytes == 1 << 34
