"""What counts as a record header, and what does not."""

from __future__ import annotations

import numpy as np
import pytest

from kvtierd.storage import layout, record
from kvtierd.storage.record import Kind, Life, RecordHeader
from tests.unit.storage.blocks import Block, namespace

LIFE = Life(segment=3, generation=77, salt=0x5A5A, size_bytes=1 << 20)


def block_page(offset: int = 4096) -> np.ndarray:
    block = Block(1)
    shape = block.geometry
    header = RecordHeader(
        Kind.BLOCK,
        offset,
        99,
        layout.block_header_bytes(shape.layers),
        shape.slot_bytes,
        shape.layers,
        block.digest,
        block.key,
        block.block_sum,
        shape.layer_bytes,
        shape.layer_stride,
        origin=99,
    )
    page = np.empty(header.header_bytes, np.uint8)
    record.encode(header, block.sums.view(np.uint8), LIFE, page)
    assert record.decode(page, LIFE, offset) == header
    return page


@pytest.mark.parametrize("byte", [*range(192), 192, 199, 207, 208, 1000, 4095])
def test_header_with_any_flipped_bit_is_no_header(byte: int) -> None:
    page = block_page()
    page[byte] ^= 1 << (byte % 8)
    assert record.decode(page, LIFE, 4096) is None


@pytest.mark.parametrize(
    "life",
    [
        Life(3, 78, 0x5A5A, 1 << 20),
        Life(3, 77, 0x5A5B, 1 << 20),
        Life(4, 77, 0x5A5A, 1 << 20),
        Life(3, 77, 0x5A5A, 8192),
    ],
    ids=["later generation", "other salt", "other segment", "shorter segment"],
)
def test_header_of_another_life_is_no_header(life: Life) -> None:
    assert record.decode(block_page(), life, 4096) is None


def test_header_at_another_place_is_no_header() -> None:
    assert record.decode(block_page(8192), LIFE, 4096) is None


def test_truncated_header_is_no_header() -> None:
    kills = [(bytes(32), bytes([n] * 32), n) for n in range(100)]
    body = record.kill_body(kills)
    header = RecordHeader(Kind.TOMBSTONE, 4096, 5, layout.header_bytes(body.size), count=len(kills))
    page = np.empty(header.header_bytes, np.uint8)
    record.encode(header, body, LIFE, page)
    assert page.size == 8192
    assert record.decode(page[:4096], LIFE, 4096) is None
    stored = record.stored_kills(page, header)
    assert [row["sequence"] for row in stored] == list(range(100))


@pytest.mark.parametrize(
    "broken",
    [
        {"payload_bytes": 4096},
        {"count": 3},
        {"layer_stride": 8192},
        {"header_bytes": 8192},
        {"payload_bytes": 1 << 30, "layer_stride": 1 << 29},
    ],
    ids=["payload", "count", "stride", "header", "beyond the segment"],
)
def test_header_whose_sizes_disagree_is_no_header_though_its_checksum_holds(broken: dict[str, int]) -> None:
    fields = {"payload_bytes": 8192, "count": 2, "layer_stride": 4096, "layer_bytes": 4096, "header_bytes": 4096}
    fields |= broken
    header = RecordHeader(Kind.BLOCK, 4096, 1, **fields)
    page = np.zeros(header.header_bytes, np.uint8)
    record.encode(header, np.zeros(8 * header.count, np.uint8), LIFE, page)
    assert record.decode(page, LIFE, 4096) is None


def test_header_grows_by_pages_with_its_layers() -> None:
    assert layout.block_header_bytes(1) == 4096
    assert layout.block_header_bytes(488) == 4096
    assert layout.block_header_bytes(489) == 8192
    assert layout.block_header_bytes(1024) == 12288


def test_namespace_whose_digest_is_another_ones_is_not_read() -> None:
    first, second = namespace(), namespace(model="other")
    body = record.namespace_body(first)
    page = np.empty(4096, np.uint8)
    for digest, expected in ((first.digest(), first), (second.digest(), None)):
        header = RecordHeader(Kind.NAMESPACE, 4096, 1, 4096, count=body.size, namespace=digest)
        record.encode(header, body, LIFE, page)
        assert record.stored_namespace(page, header) == expected


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", b"\x93\x01\x02\x03"])
def test_namespace_that_is_no_namespace_is_not_read(body: bytes) -> None:
    data = np.frombuffer(body, np.uint8)
    header = RecordHeader(Kind.NAMESPACE, 4096, 1, 4096, count=data.size)
    page = np.empty(4096, np.uint8)
    record.encode(header, data, LIFE, page)
    assert record.stored_namespace(page, header) is None


@pytest.mark.parametrize(
    "name", ["segment-1", "segment-0000001", "segment-00001x", "segment-²00000", "lost+found", "x"]
)
def test_other_names_are_not_segments(name: str) -> None:
    assert layout.segment_id(name) is None


@pytest.mark.parametrize("number", [0, 7, 999_999, 1_000_000, (1 << 32) - 1])
def test_segment_names_are_read_back(number: int) -> None:
    assert layout.segment_id(layout.segment_name(number)) == number
