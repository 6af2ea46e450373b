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
from kvtierd.storage.interface import Extents, GoneError, LayerParts
from kvtierd.storage.layout import block_header_bytes, segment_name
from kvtierd.storage.striped import StripedStore
from tests.unit.storage.blocks import LARGE, ODD, SMALL, Block, engine, memory, namespace, opened, put, run, settings

FIELDS = {"capacity": 64 << 20, "segment_bytes": 8 << 20}


def parts(blocks: list[Block], extents: list[Extent], layer: int, **kw: bool) -> LayerParts:
    """The layer's parts of these blocks, to be read into memory of their own."""
    geometry, known = blocks[0].geometry, kw.get("known", False)
    sums = [block.sums if known else np.zeros(geometry.layers, np.uint64) for block in blocks]
    return LayerParts(
        namespace=blocks[0].digest,
        geometry=geometry,
        layer=layer,
        keys=np.array([np.frombuffer(block.key, np.uint8) for block in blocks]),
        extents=Extents.of(extents),
        block_sums=np.array([block.block_sum for block in blocks], np.uint64),
        memory=memory(len(blocks) * geometry.layer_stride, aligned=kw.get("aligned", True)),
        offsets=np.arange(len(blocks)) * geometry.layer_stride,
        sums=np.array(sums, np.uint64),
        known=np.full(len(blocks), known),
    )


def part(block: Block, extent: Extent, layer: int, **kw: bool) -> LayerParts:
    return parts([block], [extent], layer, **kw)


def is_right(block: Block, read: LayerParts, i: int) -> bool:
    begin = read.layer * block.geometry.layer_stride
    size = block.geometry.layer_bytes
    return np.array_equal(read.memory[read.offsets[i] :][:size], block.data[begin : begin + size])


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
                read = parts(blocks, extents, layer, aligned=aligned)
                assert await store.read_layers(read) == {}
                assert all(is_right(block, read, i) for i, block in enumerate(blocks))
                assert all(np.array_equal(block.sums, read.sums[i]) for i, block in enumerate(blocks))

    run(body)


def test_no_more_is_read_than_the_part_once_the_sums_are_known(tmp_path: Path) -> None:
    async def body() -> None:
        block = Block(1, namespace(LARGE))
        async with opened(tmp_path, **FIELDS) as (store, _):
            (extent,) = await put(store, block)
            read = [int(store.stats()["read_bytes"])]
            for known in (False, True):
                assert await store.read_layers(part(block, extent, 2, known=known)) == {}
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
                read = parts([other, block], [extents[1], extents[0]], 1, known=known)
                found = await store.read_layers(read)
                assert list(found) == [1]
                assert isinstance(found[1], CorruptionError)
                assert block.key.hex()[:16] in str(found[1])
                assert "layer 1" in str(found[1])
                assert is_right(other, read, 0)
            assert await store.read_layers(part(block, extents[0], 0)) == {}
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
            found = await store.read_layers(part(block, extent, 1))
            assert isinstance(found[0], CorruptionError)
            assert await store.read_layers(part(block, extent, 1, known=True)) == {}

    run(body)


@pytest.mark.parametrize("wrong", ["key", "block_sum", "place", "length", "layer", "memory", "sums", "namespace"])
def test_what_is_not_that_part_of_that_block_is_an_error(tmp_path: Path, wrong: str) -> None:
    async def body() -> None:
        block = Block(1)
        async with opened(tmp_path) as (store, _):
            (extent,) = await put(store, block)
            right = part(block, extent, 1)
            place = dataclasses.replace(extent, offset=extent.offset + 4096)
            length = dataclasses.replace(extent, length=extent.length + 4096)
            changed = {
                "key": {"keys": np.zeros_like(right.keys)},
                "block_sum": {"block_sums": right.block_sums ^ np.uint64(1)},
                "place": {"extents": Extents.of([place])},
                "length": {"extents": Extents.of([length])},
                "layer": {"layer": SMALL.layers},
                "memory": {"memory": right.memory[:-4096]},
                "sums": {"sums": right.sums[:, :-1]},
                "namespace": {"namespace": bytes(32)},
            }[wrong]
            found = await store.read_layers(dataclasses.replace(right, **changed))
            assert list(found) == [0]
            assert isinstance(found[0], StorageError)
            assert await store.read_layers(right) == {}

    run(body)


def test_of_many_parts_only_those_that_are_gone_do_not_come(tmp_path: Path) -> None:
    async def body() -> None:
        blocks = [Block(number) for number in range(6)]
        async with opened(tmp_path) as (store, _):
            extents = await put(store, *blocks)
            await store.delete([(blocks[i].digest, blocks[i].key, extents[i]) for i in (0, 4)])
            read = parts(blocks, extents, 1)
            found = await store.read_layers(read)
            assert sorted(found) == [0, 4]
            assert all(isinstance(error, GoneError) for error in found.values())
            assert all(is_right(blocks[i], read, i) for i in (1, 2, 3, 5))
            assert store.stats()["gone_reads"] == 2

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
            read = parts(blocks, extents, 1)
            assert await store.read_layers(read) == {}
            assert all(is_right(block, read, i) for i, block in enumerate(blocks))
            assert all(np.array_equal(block.sums, read.sums[i]) for i, block in enumerate(blocks))
        finally:
            await store.close()

    run(body)


def test_a_closed_store_reads_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        block = Block(1)
        async with opened(tmp_path) as (store, _):
            (extent,) = await put(store, block)
        found = await store.read_layers(part(block, extent, 0))
        assert isinstance(found[0], StorageError)

    run(body)
