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
from kvtierd.storage import headers, index_frames, layout, record, superblock
from kvtierd.storage.facts import Facts
from kvtierd.storage.index_frames import FrameWriter, decode_file
from kvtierd.storage.index_log import encode_facts
from kvtierd.storage.interface import ReadItem
from kvtierd.storage.record import Kind, Life, RecordHeader
from kvtierd.storage.superblock import Superblock
from tests.unit.storage.blocks import forget_index, known, opened, put, readable, run

DOCUMENT = Path(superblock.__file__).with_name("FORMAT.md")
LINE = re.compile(r"^([a-z]+(?:-\d{6})?) ([0-9a-f]{6}) ([0-9a-f]{2,64})$", re.MULTILINE)
UUID = bytes(range(16))
LIFE = Life(segment=0, generation=1 << 40, salt=0x0123456789ABCDEF, size_bytes=65536)
NAMESPACE = Namespace(model="m", geometry=Geometry(block_size=1, layers=2, kv_heads=1, k_dim=2, v_dim=2, dtype="fp16"))
KEY = bytes(range(32, 64))
FIRST = (1 << 40) + 1


def example(document: Path) -> dict[str, bytes]:
    """The files of a worked example."""
    files = {"superblock": bytearray(2 * PAGE_BYTES), "segment-000000": bytearray(65536)}
    lines = LINE.findall(document.read_text())
    assert len(lines) > 20
    for name, offset, text in lines:
        at, data = int(offset, 16), bytes.fromhex(text)
        image = files.setdefault(name, bytearray())
        image[at : at + len(data)] = data
    return {name: bytes(image) for name, image in files.items()}


@pytest.fixture(scope="module")
def files() -> dict[str, np.ndarray]:
    return {name: np.frombuffer(data, np.uint8).copy() for name, data in example(DOCUMENT).items()}


def test_example_superblock_is_what_the_text_says(files: dict[str, np.ndarray]) -> None:
    data = files["superblock"].tobytes()
    for copy in range(2):
        page = data[copy * PAGE_BYTES : (copy + 1) * PAGE_BYTES]
        assert superblock.decode(page) == Superblock(UUID, 1)
        assert superblock.encode(Superblock(UUID, 1), copy) == page


def test_example_segment_header_is_what_the_text_says(files: dict[str, np.ndarray]) -> None:
    page = files["segment-000000"][:PAGE_BYTES]
    assert headers.decode_header(page, 0, UUID) == LIFE
    written = np.ones(PAGE_BYTES, np.uint8)
    headers.encode_header(LIFE, UUID, written)
    assert np.array_equal(written, page)


def test_example_segment_ends_in_a_copy_of_its_header(files: dict[str, np.ndarray]) -> None:
    image = files["segment-000000"]
    assert np.array_equal(image[-PAGE_BYTES:], image[:PAGE_BYTES])
    assert LIFE.end_bytes == image.size - PAGE_BYTES


def test_example_index_is_what_the_text_says(files: dict[str, np.ndarray]) -> None:
    empty = decode_file(files["checkpoint-000001"].tobytes(), UUID, 1)
    assert (empty.ended, len(empty.blocks), empty.lifetime_bytes) == (True, 0, 0)
    data = files["journal-000001"].tobytes()
    found = decode_file(data, UUID, 1)
    assert (found.valid_bytes, found.ended) == (len(data), False)
    assert found.spaces == {0: (NAMESPACE.digest(), NAMESPACE)}
    (entry,), (kill,), (head,) = found.blocks, found.kills, found.heads
    assert (entry["key"].tobytes(), entry["sequence"], entry["page"], entry["codec"]) == (KEY, FIRST + 1, 2, 0)
    assert (kill["key"].tobytes(), kill["sequence"], kill["space"]) == (KEY, FIRST + 1, 0)
    assert tuple(head) == (LIFE.generation, 6 * PAGE_BYTES, 0, 0)
    facts = Facts()
    facts.add_file(found)
    writer = FrameWriter(UUID, 1)
    assert b"".join([writer.begin(0), *encode_facts(facts, writer)]) == data


@pytest.mark.parametrize("without_index", [False, True])
def test_example_opens_as_a_store_in_which_the_block_is_deleted(tmp_path: Path, *, without_index: bool) -> None:
    async def check() -> None:
        for name, data in example(DOCUMENT).items():
            (tmp_path / name).write_bytes(data)
        if without_index:
            forget_index(tmp_path)
        async with opened(tmp_path) as (store, found):
            assert len(found.extents) == 0
            assert found.dropped == 0
            assert found.namespaces == {NAMESPACE.digest(): NAMESPACE}
            (extent,) = await put(store, known(1))
            assert await readable(store, known(1), extent)

    run(check)


def test_store_of_format_1_is_taken_over_in_place(tmp_path: Path) -> None:
    """Its segments are read, not appended to, and become format 2 when they are recycled."""

    async def check() -> None:
        old = example(Path(__file__).with_name("format-1.txt"))
        tombstone = old["segment-000000"].index(b"KVTRECRD", 0x4001)
        image = old["segment-000000"][:tombstone] + bytes(PAGE_BYTES) + old["segment-000000"][tombstone + PAGE_BYTES :]
        (tmp_path / "superblock").write_bytes(old["superblock"])
        (tmp_path / "segment-000000").write_bytes(image)
        async with opened(tmp_path) as (store, found):
            assert any("had format 1 and has format 2" in note for note in found.notes)
            (extent,) = found.extents
            assert found.keys[0].tobytes() == KEY
            item = ReadItem(
                NAMESPACE.digest(), KEY, NAMESPACE.geometry, extent, int(found.block_sums[0]),
                np.zeros(8192, np.uint8), np.zeros(2, np.uint64),
            )  # fmt: skip
            assert await store.read([item]) == [None]
            assert item.out[:8].tolist() == list(range(1, 9))
            (place,) = await put(store, known(1))
            assert place.segment != 0
        assert (tmp_path / "segment-000000").read_bytes() == image
        assert (await superblock.load(tmp_path)).version == 2
        async with opened(tmp_path) as (_, found):
            assert len(found.extents) == 2

    run(check)


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
    ("section", "table", "size"),
    [
        ("## 2", 1, layout.SUPERBLOCK.size),
        ("## 3", 1, layout.SEGMENT.size),
        ("## 4", 1, layout.RECORD.size),
        ("## 6", 1, index_frames.FRAME.size),
        ("## 6", 2, index_frames.ENTRY_DTYPE.itemsize),
    ],
)
def test_byte_tables_have_no_gap_and_end_where_the_struct_does(section: str, table: int, size: int) -> None:
    text = DOCUMENT.read_text().split(section + ".", 1)[1].split("\n## ", 1)[0]
    text = text.split("| offset | size | field | meaning |\n")[table]
    text = text[: text.find("\n\n")] if "\n\n" in text else text
    rows = [(int(at), int(count)) for at, count in re.findall(r"^\| (\d+) \| (\d+) \|", text, re.MULTILINE)]
    end = 0
    for at, count in rows:
        assert at == end
        end += count
    assert end == size


def test_record_table_names_the_columns_of_a_scan_at_their_offsets() -> None:
    text = DOCUMENT.read_text().split("## 4.", 1)[1].split("\n## ", 1)[0]
    table = dict(re.findall(r"^\| (\d+) \| \d+ \| (\w+) \|", text, re.MULTILINE))
    fields = layout.RECORD_DTYPE.fields
    assert fields is not None
    assert {str(offset): name for name, (_, offset, *_) in fields.items()} == table
