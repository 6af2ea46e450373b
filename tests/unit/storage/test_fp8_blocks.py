"""Blocks in FP8 on disk: they come back as such, whoever asks, and never pass for exact ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from kvtierd.core.checksum import block_sum, layer_sums
from kvtierd.core.errors import CorruptionError, StorageError
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.core.stored_form import Codec, EncodedLayout
from kvtierd.core.units import KIB
from kvtierd.gpu.codec import BlockCodec
from kvtierd.storage import Extent, ReadItem, Recovered, SegmentStore, WriteItem
from kvtierd.storage.checker import Verdict, check_store
from kvtierd.storage.layout import block_shape, codecs_of
from kvtierd.storage.record import Kind, Life, RecordHeader, decode, encode
from tests.unit.storage.blocks import Block, forget_index, memory, namespace, opened, run

PLAIN = Geometry(block_size=64, layers=3, kv_heads=2, k_dim=64, v_dim=32, dtype="bf16")
FLAT = Geometry(block_size=16, layers=2, kv_heads=2, k_dim=64, v_dim=32, dtype="bf16")
"""Small: a record takes 12 KiB."""
LATENT = Geometry(block_size=32, layers=2, kv_heads=1, k_dim=576, v_dim=0, dtype="fp16", layout="hnd")
WIDE = Geometry(block_size=16, layers=2, kv_heads=3, k_dim=192, v_dim=128, dtype="fp32")
SHAPES = pytest.mark.parametrize("geometry", [PLAIN, LATENT, WIDE], ids=["plain", "latent", "fp32"])


class Encoded:
    """A block in FP8 of normal deviates, made from its number."""

    def __init__(self, number: int, geometry: Geometry) -> None:
        self.space: Namespace = namespace(geometry)
        self.form = EncodedLayout(geometry)
        values = np.random.default_rng(number).standard_normal(geometry.slot_bytes // 4).astype(np.float32)
        if geometry.dtype != "fp32":
            values = np.repeat(values, 2)
        raw = values.astype(np.float16).view(np.uint8) if geometry.dtype == "fp16" else values.view(np.uint8)
        if geometry.dtype == "bf16":
            raw = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        self.data = memory(self.form.slot_bytes)
        BlockCodec(geometry).encode(raw[: geometry.slot_bytes], self.data)
        self.key = np.random.default_rng(number).bytes(32)
        self.sums = layer_sums(self.data, self.form)
        self.item = WriteItem(
            self.space.digest(), self.key, geometry, self.data, self.sums, number, codec=Codec.FP8_E4M3
        )

    def fetch(self, extent: Extent) -> ReadItem:
        out, sums = memory(self.form.slot_bytes), np.zeros(self.form.layers, np.uint64)
        total = block_sum(self.sums)
        return ReadItem(self.item.namespace, self.key, self.item.geometry, extent, total, out, sums, Codec.FP8_E4M3)


async def stored(store: SegmentStore, *blocks: Encoded) -> list[Extent]:
    found = []
    for block in blocks:
        store.register(block.item.namespace, block.space)
    for result in await store.write([block.item for block in blocks]):
        assert isinstance(result, Extent), result
        found.append(result)
    return found


async def assert_there(store: SegmentStore, found: Recovered, blocks: list[Encoded]) -> None:
    assert found.codecs.tolist() == [Codec.FP8_E4M3] * len(blocks)
    places = {key.tobytes(): extent for key, extent in zip(found.keys, found.extents, strict=True)}
    for block in blocks:
        item = block.fetch(places[block.key])
        assert await store.read([item]) == [None]
        assert np.array_equal(item.out, block.data)
        assert np.array_equal(item.sums, block.sums)


@SHAPES
def test_fp8_block_comes_back_with_its_scales_and_errors_by_index_and_by_scan(tmp_path: Path, geometry) -> None:
    async def check() -> None:
        blocks = [Encoded(number, geometry) for number in range(3)]
        async with opened(tmp_path, capacity=0, segment_bytes=4 << 20) as (store, _):
            extents = await stored(store, *blocks)
            assert {extent.length for extent in extents} == {block_shape(geometry, Codec.FP8_E4M3).length}
            await store.flush()
        for prepare in (lambda: None, lambda: forget_index(tmp_path)):
            prepare()
            async with opened(tmp_path, capacity=0, segment_bytes=4 << 20) as (store, found):
                await assert_there(store, found, blocks)

    run(check)


@SHAPES
def test_checker_verifies_fp8_payloads_and_names_damage(tmp_path: Path, geometry) -> None:
    async def check() -> None:
        async with opened(tmp_path, capacity=0, segment_bytes=4 << 20) as (store, _):
            (first, second) = await stored(store, Encoded(1, geometry), Encoded(2, geometry))
            await store.flush()
        report = await check_store(tmp_path, verify_data=True)
        assert (report.verdict, report.live_blocks) == (Verdict.CLEAN, 2)
        assert report.verified_bytes == first.length + second.length
        path = tmp_path / f"segment-{second.segment:06d}"
        data = bytearray(path.read_bytes())
        scales = second.offset + second.length - EncodedLayout(geometry).layer_stride
        data[scales + EncodedLayout(geometry).scales_offset] ^= 1
        path.write_bytes(data)
        report = await check_store(tmp_path, verify_data=True)
        assert report.verdict is Verdict.BROKEN
        assert "damaged" in report.findings[-1].what

    run(check)


def test_fp8_block_that_is_asked_for_as_exact_is_an_error_and_the_other_way_round(tmp_path: Path) -> None:
    async def check() -> None:
        encoded, exact = Encoded(1, PLAIN), Block(2, namespace(PLAIN))
        async with opened(tmp_path, capacity=0, segment_bytes=4 << 20) as (store, _):
            (extent,) = await stored(store, encoded)
            (plain,) = await store.write([exact.item()])
            assert isinstance(plain, Extent)
            out, sums = memory(PLAIN.slot_bytes), np.zeros(PLAIN.layers, np.uint64)
            wrong = ReadItem(exact.digest, encoded.key, PLAIN, extent, block_sum(encoded.sums), out, sums)
            (error,) = await store.read([wrong])
            assert isinstance(error, StorageError)
            cut = dataclasses.replace(wrong, extent=dataclasses.replace(extent, length=plain.length))
            (error,) = await store.read([cut])
            assert isinstance(error, StorageError)
            small = encoded.fetch(dataclasses.replace(plain, length=extent.length))
            (error,) = await store.read([dataclasses.replace(small, key=exact.key)])
            assert isinstance(error, StorageError)

    run(check)


def test_fp8_source_that_changed_before_it_was_stored_is_not_stored(tmp_path: Path) -> None:
    async def check() -> None:
        block = Encoded(1, PLAIN)
        block.data[block.form.scales_offset] ^= 1
        async with opened(tmp_path) as (store, _):
            store.register(block.item.namespace, block.space)
            (error,) = await store.write([block.item])
            assert isinstance(error, CorruptionError)

    run(check)


@pytest.mark.parametrize("codec", [1, 255])
def test_codec_that_is_none_is_an_error_that_names_it(tmp_path: Path, codec: int) -> None:
    async def check() -> None:
        block = Encoded(1, PLAIN)
        async with opened(tmp_path) as (store, _):
            (extent,) = await stored(store, block)
            (error,) = await store.write([dataclasses.replace(block.item, codec=codec)])
            assert f"codec {codec}" in str(error)
            (error,) = await store.read([dataclasses.replace(block.fetch(extent), codec=codec)])
            assert f"codec {codec}" in str(error)

    run(check)


@pytest.mark.parametrize(
    "fields", [{"dtype": "fp8_e4m3"}, {"dtype": "int8"}, {"layout": "opaque:own"}], ids=["fp8", "int8", "opaque"]
)
def test_blocks_without_an_fp8_form_have_one_codec(tmp_path: Path, fields: dict[str, str]) -> None:
    async def check() -> None:
        geometry = Geometry(block_size=16, layers=2, kv_heads=2, k_dim=64, v_dim=64, **fields)
        assert codecs_of(geometry) == (Codec.RAW,)
        block = Block(1, namespace(geometry))
        async with opened(tmp_path) as (store, _):
            store.register(block.digest, block.space)
            (error,) = await store.write([dataclasses.replace(block.item(), codec=Codec.FP8_E4M3)])
            assert "codec 2 is none" in str(error)
            (plain,) = await store.write([block.item()])
            assert isinstance(plain, Extent)
        async with opened(tmp_path) as (_, found):
            assert found.codecs.tolist() == [Codec.RAW]

    run(check)


def test_header_whose_scales_do_not_fill_its_layers_is_no_header() -> None:
    shape = block_shape(PLAIN, Codec.FP8_E4M3)
    life = Life(1, 5, 6, 1 << 20)
    for off, valid in ((0, True), (4, False)):
        header = RecordHeader(
            Kind.BLOCK,
            4096,
            9,
            shape.header_bytes,
            shape.payload_bytes,
            shape.layers,
            layer_bytes=shape.layer_bytes,
            layer_stride=shape.layer_stride,
            codec=Codec.FP8_E4M3,
            scale_offset=shape.scale_offset,
            scale_bytes=shape.scale_bytes + off,
            origin=9,
        )
        page = np.empty(header.header_bytes, np.uint8)
        encode(header, np.zeros(8 * header.count, np.uint8), life, page)
        assert (decode(page, life, 4096) == header) is valid


def test_hot_fp8_blocks_move_as_they_are_when_their_segment_is_recycled(tmp_path: Path) -> None:
    async def check() -> None:
        held: dict[int, Extent] = {}
        moved: list[int] = []

        def gone(told: list[tuple[int, Extent]]) -> None:
            for tag, _ in told:
                held.pop(tag, None)

        def go_along(told: list[tuple[int, Extent, Extent]]) -> list[bool]:
            for tag, _, new in told:
                held[tag] = new
                moved.append(tag)
            return [True] * len(told)

        async with opened(tmp_path, capacity=1536 * KIB, segment_bytes=192 * KIB) as (store, _):
            store.on_reclaim(gone)
            store.on_rewrite(lambda tags: (tags == 0).astype(np.float32), go_along)
            hot = Encoded(0, FLAT)
            (held[0],) = await stored(store, hot)
            for number in range(1, 240):
                (held[number],) = await stored(store, Encoded(number, FLAT))
                await store.flush()
                if moved:
                    break
            assert moved, "the hot block never moved"
            item = hot.fetch(held[0])
            assert await store.read([item]) == [None]
            assert np.array_equal(item.out, hot.data)

    run(check)
