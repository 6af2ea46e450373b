"""One layer's part of stored blocks: nothing else is read, and nothing that is damaged comes back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from kvtierd.core.clock import ManualClock
from kvtierd.core.errors import CorruptionError, StorageError
from kvtierd.core.geometry import Geometry
from kvtierd.storage import Extent, SegmentStore
from kvtierd.storage.interface import LayerItem
from kvtierd.storage.layout import block_header_bytes, segment_name
from kvtierd.storage.striped import StripedStore
from tests.unit.storage.blocks import LARGE, ODD, SMALL, Block, engine, memory, namespace, opened, put, run, settings

FIELDS = {"capacity": 64 << 20, "segment_bytes": 8 << 20}


def part(block: Block, extent: Extent, layer: int, *, known: bool = False, aligned: bool = True) -> LayerItem:
    out = memory(block.geometry.layer_stride, aligned=aligned)
    sums = block.sums.copy() if known else np.zeros(block.geometry.layers, np.uint64)
    return LayerItem(block.digest, block.key, block.geometry, extent, block.block_sum, layer, out, sums, known)


def is_right(block: Block, item: LayerItem) -> bool:
    begin = item.layer * block.geometry.layer_stride
    size = block.geometry.layer_bytes
    return np.array_equal(item.out[:size], block.data[begin : begin + size])


@pytest.mark.parametrize("geometry", [SMALL, ODD, LARGE], ids=["small", "odd", "large"])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
def test_every_layer_of_a_block_is_read_alone_and_its_sums_with_it(
    tmp_path: Path, geometry: Geometry, *, aligned: bool
) -> None:
    async def body() -> None:
        blocks = [Block(number, namespace(geometry)) for number in range(3)]
        async with opened(tmp_path, **FIELDS) as (store, _):
            extents = await put(store, *blocks)
            for layer in range(geometry.layers):
                items = [part(b, e, layer, aligned=aligned) for b, e in zip(blocks, extents, strict=True)]
                assert await store.read_layers(items) == [None] * 3
                assert all(is_right(b, item) for b, item in zip(blocks, items, strict=True))
                assert all(np.array_equal(b.sums, item.sums) for b, item in zip(blocks, items, strict=True))

    run(body)


def test_no_more_is_read_than_the_part_once_the_sums_are_known(tmp_path: Path) -> None:
    async def body() -> None:
        block = Block(1, namespace(LARGE))
        async with opened(tmp_path, **FIELDS) as (store, _):
            (extent,) = await put(store, block)
            read = [int(store.stats()["read_bytes"])]
            for known in (False, True):
                assert await store.read_layers([part(block, extent, 2, known=known)]) == [None]
                read.append(int(store.stats()["read_bytes"]))
            header = block_header_bytes(LARGE.layers)
            assert np.diff(read).tolist() == [LARGE.layer_stride + header, LARGE.layer_stride]

    run(body)


def test_a_damaged_layer_costs_that_layer_and_names_its_block(tmp_path: Path) -> None:
    async def body() -> None:
        block, other = Block(1, namespace(LARGE)), Block(2, namespace(LARGE))
        async with opened(tmp_path, **FIELDS) as (store, _):
            extents = await put(store, block, other)
            begin = extents[0].offset + block_header_bytes(LARGE.layers) + 1 * LARGE.layer_stride
            with (tmp_path / segment_name(extents[0].segment)).open("r+b") as file:
                file.seek(begin + 77)
                file.write(bytes([int(block.data[LARGE.layer_stride + 77]) ^ 4]))
            for known in (False, True):
                items = [part(block, extents[0], 1, known=known), part(other, extents[1], 1, known=known)]
                bad, good = await store.read_layers(items)
                assert isinstance(bad, CorruptionError)
                assert block.key.hex()[:16] in str(bad)
                assert "layer 1" in str(bad)
                assert good is None
            assert await store.read_layers([part(block, extents[0], 0)]) == [None]
            assert store.stats()["corrupt_reads"] == 2

    run(body)


def test_a_damaged_header_is_no_source_of_sums(tmp_path: Path) -> None:
    async def body() -> None:
        block = Block(1)
        async with opened(tmp_path) as (store, _):
            (extent,) = await put(store, block)
            with (tmp_path / segment_name(extent.segment)).open("r+b") as file:
                file.seek(extent.offset + 200)
                file.write(b"\x5a\xa5\x5a")
            (error,) = await store.read_layers([part(block, extent, 1)])
            assert isinstance(error, CorruptionError)
            assert await store.read_layers([part(block, extent, 1, known=True)]) == [None]

    run(body)


@pytest.mark.parametrize("wrong", ["key", "block_sum", "place", "length", "layer", "out", "sums"])
def test_what_is_not_that_part_of_that_block_is_an_error(tmp_path: Path, wrong: str) -> None:
    async def body() -> None:
        block = Block(1)
        async with opened(tmp_path) as (store, _):
            (extent,) = await put(store, block)
            item = part(block, extent, 1)
            changed = {
                "key": {"key": bytes(32)},
                "block_sum": {"block_sum": block.block_sum ^ 1},
                "place": {"extent": dataclasses.replace(extent, offset=extent.offset + 4096)},
                "length": {"extent": dataclasses.replace(extent, length=extent.length + 4096)},
                "layer": {"layer": SMALL.layers},
                "out": {"out": item.out[:-4096]},
                "sums": {"sums": item.sums[:-1]},
            }[wrong]
            (error,) = await store.read_layers([dataclasses.replace(item, **changed)])
            assert isinstance(error, StorageError)
            assert await store.read_layers([item]) == [None]

    run(body)


def test_parts_on_several_devices_are_read_from_where_they_lie(tmp_path: Path) -> None:
    async def body() -> None:
        folders = [tmp_path / name for name in "ab"]
        stores = [(str(f), SegmentStore(settings(f), clock=ManualClock(), io=engine())) for f in folders]
        store = StripedStore(stores)
        await store.open()
        try:
            blocks = [Block(number) for number in range(8)]
            store.register(blocks[0].digest, blocks[0].space)
            extents = []
            for block in blocks:
                (extent,) = await store.write([block.item()])
                assert isinstance(extent, Extent)
                extents.append(extent)
            assert len({extent.segment % 2 for extent in extents}) == 2
            items = [part(b, e, 1) for b, e in zip(blocks, extents, strict=True)]
            assert await store.read_layers(items) == [None] * len(items)
            assert all(is_right(b, item) for b, item in zip(blocks, items, strict=True))
        finally:
            await store.close()

    run(body)


def test_a_closed_store_reads_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        block = Block(1)
        async with opened(tmp_path) as (store, _):
            (extent,) = await put(store, block)
        (error,) = await store.read_layers([part(block, extent, 0)])
        assert isinstance(error, StorageError)

    run(body)
