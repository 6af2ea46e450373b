"""Verifying what is stored, header and payload, against its own checksums: for the checker and the scrub."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from kvtierd.core.checksum import Bytes, block_sum, layer_sum
from kvtierd.core.units import PAGE_BYTES
from kvtierd.storage.buffers import Scratch, page_buffer
from kvtierd.storage.facts import Facts
from kvtierd.storage.io import SegmentFile, read_exact
from kvtierd.storage.record import Kind, Life, RecordHeader, decode, stored_sums
from kvtierd.storage.recovery import Live
from kvtierd.storage.segment import Segment


def record_problem(view: Bytes, life: Life, offset: int) -> tuple[RecordHeader | None, str]:
    """The header that a whole BLOCK record has, and what is wrong with it; "" when every byte is what was stored."""
    header = decode(view, life, offset)
    if header is None or header.kind is not Kind.BLOCK or header.length > view.size:
        return None, "no valid block lies here"
    sums = stored_sums(view, header)
    if block_sum(sums.astype(np.uint64)) != header.block_sum:
        return header, "its block sum is not that of its layer sums"
    for layer in range(header.count):
        begin = header.header_bytes + layer * header.layer_stride
        if layer_sum(view[begin : begin + header.layer_bytes]) != int(sums[layer]):
            return header, f"the bytes of layer {layer} are damaged"
    return header, ""


def read_record(file: SegmentFile, offset: int, length: int, scratch: Scratch) -> Bytes:
    """A record's bytes. Raises OSError."""
    memory = page_buffer(length)
    read_exact(file, [memory], offset, scratch)
    return memory


def damaged_payloads(
    live: Live, facts: Facts, segments: Mapping[int, Segment], report: Callable[[np.void, str], None]
) -> set[int]:
    """Read every live block; returns the indices of those that are not whole, each reported."""
    scratch = Scratch()
    bad: set[int] = set()
    for index, (row, length) in enumerate(zip(live.rows, live.lengths.tolist(), strict=True)):
        segment, offset = segments[int(row["segment"])], int(row["page"]) * PAGE_BYTES
        assert segment.life is not None
        try:
            view = read_record(segment.file, offset, length, scratch)
        except OSError as error:
            report(row, f"it cannot be read: {error.strerror or error}")
            bad.add(index)
            continue
        header, problem = record_problem(view, segment.life, offset)
        if header is not None and not problem:
            same = header.key == row["key"].tobytes() and header.namespace == facts.spaces.digests[row["space"]]
            problem = "" if same and header.block_sum == row["block_sum"] else "another block lies here"
        if problem:
            report(row, problem)
            bad.add(index)
    return bad
