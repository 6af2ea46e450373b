"""Where the fields of a block's record and of a slot descriptor lie: taken from where these are defined."""

from __future__ import annotations

from typing import Any

from kvtierd.index.block_table import RECORD
from kvtierd.protocol.messages import SLOT_DTYPE


def _offset(record: Any, name: str, size: int) -> int:
    """Number of a field among words of `size` bytes."""
    begin = int(record.fields[name][1])
    assert begin % size == 0, f"{name} does not begin at a word of {size} bytes"
    return begin // size


FLAGS, MARKS = _offset(RECORD, "flags", 1), _offset(RECORD, "marks", 1)
"""Bytes of a record."""
MOVES = _offset(RECORD, "moves", 2)
"""16-bit word of a record."""
HOST_SLOT, NEXT_ROW = _offset(RECORD, "host_slot", 4), _offset(RECORD, "next_row", 4)
LAST_ACCESS, NAMESPACE = _offset(RECORD, "last_access_s", 4), _offset(RECORD, "namespace", 4)
"""32-bit words of a record; the upper half of the one with the namespace is the heat."""
assert _offset(RECORD, "heat", 2) == 2 * NAMESPACE + 1

DESCRIPTOR_BYTES = SLOT_DTYPE.itemsize
STATUS_AT, SOURCE_AT = _offset(SLOT_DTYPE, "status", 1), _offset(SLOT_DTYPE, "source", 1)
OFFSET_AT, GENERATION_AT = _offset(SLOT_DTYPE, "offset", 1), _offset(SLOT_DTYPE, "generation", 1)
assert _offset(SLOT_DTYPE, "chunk", 1) == 0
