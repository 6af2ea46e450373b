"""FORMAT.md is normative: its worked example is read and written by the code, its sizes are the code's."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kvtierd.core.checksum import layer_sums
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.core.units import PAGE_BYTES
from kvtierd.storage import layout, record, segment, superblock
from kvtierd.storage.record import Kind, Life, RecordHeader
from kvtierd.storage.superblock import Superblock

DOCUMENT = Path(superblock.__file__).with_name("FORMAT.md")
LINE = re.compile(r"^(superblock|segment-000000) ([0-9a-f]{6}) ([0-9a-f]{64})$", re.MULTILINE)
UUID = bytes(range(16))
LIFE = Life(segment=0, generation=1 << 40, salt=0x0123456789ABCDEF, size_bytes=65536)
NAMESPACE = Namespace(model="m", geometry=Geometry(block_size=1, layers=2, kv_heads=1, k_dim=2, v_dim=2, dtype="fp16"))
KEY = bytes(range(32, 64))
FIRST = (1 << 40) + 1


@pytest.fixture(scope="module")
def files() -> dict[str, np.ndarray]:
    images = {"superblock": np.zeros(2 * PAGE_BYTES, np.uint8), "segment-000000": np.zeros(65536, np.uint8)}
    lines = LINE.findall(DOCUMENT.read_text())
    assert len(lines) > 20
    for name, offset, data in lines:
        images[name][int(offset, 16) : int(offset, 16) + 32] = np.frombuffer(bytes.fromhex(data), np.uint8)
    return images


def test_example_superblock_is_what_the_text_says(files: dict[str, np.ndarray]) -> None:
    data = files["superblock"].tobytes()
    for copy in range(2):
        page = data[copy * PAGE_BYTES : (copy + 1) * PAGE_BYTES]
        assert superblock.decode(page) == Superblock(UUID, 1)
        assert superblock.encode(Superblock(UUID, 1), copy) == page


def test_example_segment_header_is_what_the_text_says(files: dict[str, np.ndarray]) -> None:
    page = files["segment-000000"][:PAGE_BYTES]
    assert segment.decode_header(page, 0, UUID) == LIFE
    written = np.ones(PAGE_BYTES, np.uint8)
    segment.encode_header(LIFE, UUID, written)
    assert np.array_equal(written, page)


def test_example_records_are_what_the_text_says(files: dict[str, np.ndarray]) -> None:
    image = files["segment-000000"]
    digest = NAMESPACE.digest()
    named = _decoded(image, PAGE_BYTES)
    assert (named.kind, named.sequence, named.namespace) == (Kind.NAMESPACE, FIRST, digest)
    assert record.stored_namespace(image[named.offset :], named) == NAMESPACE

    block = _decoded(image, named.offset + named.length)
    assert (block.kind, block.sequence, block.namespace, block.key) == (Kind.BLOCK, FIRST + 1, digest, KEY)
    payload = image[block.offset + block.header_bytes : block.offset + block.length]
    assert payload[:8].tolist() == list(range(1, 9))
    assert payload[4096:4104].tolist() == list(range(17, 25))
    sums = layer_sums(payload, NAMESPACE.geometry)
    assert np.array_equal(record.stored_sums(image[block.offset :], block), sums)

    tombstone = _decoded(image, block.offset + block.length)
    assert (tombstone.kind, tombstone.sequence, tombstone.count) == (Kind.TOMBSTONE, FIRST + 2, 1)
    (kill,) = record.stored_kills(image[tombstone.offset :], tombstone)
    assert (kill["namespace"].tobytes(), kill["key"].tobytes(), kill["sequence"]) == (digest, KEY, FIRST + 1)


def _decoded(image: np.ndarray, offset: int) -> RecordHeader:
    """Decode a record of the example and see that encoding it again gives the same bytes."""
    view = image[offset:]
    header = record.decode(view, LIFE, offset)
    assert header is not None
    again = np.full(header.header_bytes, 255, np.uint8)
    record.encode(header, record.body_of(view, header), LIFE, again)
    assert np.array_equal(again, view[: header.header_bytes])
    return header


@pytest.mark.parametrize(
    ("section", "size"),
    [("## 2", layout.SUPERBLOCK.size), ("## 3", layout.SEGMENT.size), ("## 4", layout.RECORD.size)],
)
def test_byte_tables_have_no_gap_and_end_where_the_struct_does(section: str, size: int) -> None:
    text = DOCUMENT.read_text().split(section + ".", 1)[1].split("\n## ", 1)[0]
    rows = [(int(at), int(count)) for at, count in re.findall(r"^\| (\d+) \| (\d+) \|", text, re.MULTILINE)]
    end = 0
    for at, count in rows:
        assert at == end
        end += count
    assert end == size


def test_record_table_names_the_columns_of_a_scan_at_their_offsets() -> None:
    text = DOCUMENT.read_text().split("## 4.", 1)[1]
    table = dict(re.findall(r"^\| (\d+) \| \d+ \| (\w+) \|", text, re.MULTILINE))
    fields = layout.RECORD_DTYPE.fields
    assert fields is not None
    assert {str(offset): name for name, (_, offset, *_) in fields.items()} == table
