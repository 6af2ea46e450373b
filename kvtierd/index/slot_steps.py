"""Steps over columns of slots and rows that every request takes: one pass each, where NumPy would take five."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from kvtierd.index.block_table import RECORD
from kvtierd.index.jit import compiled
from kvtierd.index.layout import RECORD_BYTES, ROW_NUMBERS, Rows

Holds = npt.NDArray[np.int32]
Words = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]

_FLAGS_AT = RECORD.fields["flags"][1] if RECORD.fields else 0
HOST_SLOT, GPU_SLOT = 8, 9
"""32-bit words of a record of the block table: where its copy in host, and in gpu, lies."""
assert RECORD.fields is not None
assert RECORD.fields["host_slot"][1] == 4 * HOST_SLOT
assert RECORD.fields["gpu_slot"][1] == 4 * GPU_SLOT


@compiled(types.void(types.int32[::1], ROW_NUMBERS))
def hold(holds: Holds, slots: Rows) -> None:
    """One hold more of each slot; a slot may be named several times."""
    for slot in slots:
        holds[slot] += 1


@compiled(types.int64(types.int32[::1], types.int32[::1], types.int32, ROW_NUMBERS, ROW_NUMBERS))
def unhold(holds: Holds, row: Rows, orphan: int, slots: Rows, ended: Rows) -> int:
    """One hold less of each slot. Those without holds now whose row is `orphan` go to `ended`; how many, each once.

    -1 for a slot that nobody holds: those before it have one hold less then.
    """
    found = 0
    for slot in slots:
        if holds[slot] <= 0:
            return -1
        holds[slot] -= 1
        if holds[slot] == 0 and row[slot] == orphan:
            ended[found] = slot
            found += 1
    return found


@compiled(types.int64(types.int32[::1], types.int32[::1], types.int32, ROW_NUMBERS, ROW_NUMBERS))
def disown(holds: Holds, row: Rows, orphan: int, slots: Rows, idle: Rows) -> int:
    """The slots' row is `orphan` from now on; those that nobody holds go to `idle`, how many."""
    found = 0
    for slot in slots:
        row[slot] = orphan
        if holds[slot] == 0:
            idle[found] = slot
            found += 1
    return found


@compiled(
    types.int64(types.int32[:, ::1], types.uint8[:, ::1], types.int64, types.int64, types.int64, ROW_NUMBERS,
    ROW_NUMBERS, ROW_NUMBERS)
)  # fmt: skip
def drop_copies(
    words: Words, octets: Bytes, word: int, flag: int, counting: int, rows: Rows, slots: Rows, bare: Rows
) -> int:
    """Rows lose their copy in a tier: its slot (word `word` of the record) goes to `slots` [n], its flag is cleared.

    Rows that have none of the flags `counting` any more go to `bare`; how many. `words` and `octets` are the block
    table's records as int32 and as bytes.
    """
    found = 0
    for index, row in enumerate(rows):
        slots[index] = words[row, word]
        words[row, word] = -1
        octets[row, _FLAGS_AT] &= np.uint8(255 - flag)
        if octets[row, _FLAGS_AT] & np.uint8(counting) == 0:
            bare[found] = row
            found += 1
    return found


assert RECORD.itemsize == RECORD_BYTES
