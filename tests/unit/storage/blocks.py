"""Blocks to store: what every test of the storage package starts from."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from kvtierd.config.schema import Nvme
from kvtierd.core.checksum import Bytes, block_sum, layer_sums
from kvtierd.core.clock import ManualClock
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.core.units import KIB, MIB
from kvtierd.storage import Extent, ReadItem, Recovered, SegmentStore, WriteItem
from kvtierd.storage.buffers import page_buffer
from kvtierd.storage.io import StorageIo
from kvtierd.storage.io_posix import PosixIo

SMALL = Geometry(block_size=16, layers=2, kv_heads=2, k_dim=32, v_dim=32, dtype="fp16")
"""8 KiB and no padding; a record takes 12 KiB."""
ODD = Geometry(block_size=3, layers=5, kv_heads=1, k_dim=7, v_dim=0, dtype="fp32")
"""A latent form whose layers are mostly padding."""
LARGE = Geometry(block_size=128, layers=4, kv_heads=8, k_dim=128, v_dim=128, dtype="bf16")
"""2 MiB."""


def namespace(geometry: Geometry = SMALL, model: str = "model", **fields: Any) -> Namespace:
    return Namespace(model=model, geometry=geometry, **fields)


TINY = {"capacity": 380 * KIB, "segment_bytes": 80 * KIB}
"""Three or four segments of about six blocks."""


class Block:
    """A block with random contents, made from its number."""

    def __init__(self, number: int, space: Namespace | None = None, *, version: int = 0, aligned: bool = True) -> None:
        self.space = space if space is not None else namespace()
        self.geometry = self.space.geometry
        self.digest = self.space.digest()
        self.tag = number
        rng = np.random.default_rng((number, version))
        self.key = np.random.default_rng(number).bytes(32)
        self.data = memory(self.geometry.slot_bytes, aligned=aligned)
        self.data[:] = np.frombuffer(rng.bytes(self.geometry.slot_bytes), np.uint8)
        self.sums = layer_sums(self.data, self.geometry)
        self.block_sum = block_sum(self.sums)

    def item(self) -> WriteItem:
        return WriteItem(self.digest, self.key, self.geometry, self.data, self.sums, self.tag)

    def fetch(self, extent: Extent, *, aligned: bool = True) -> ReadItem:
        out = memory(self.geometry.slot_bytes, aligned=aligned)
        sums = np.zeros(self.geometry.layers, np.uint64)
        return ReadItem(self.digest, self.key, self.geometry, extent, self.block_sum, out, sums)

    def same(self, data: Bytes) -> bool:
        """Whether every layer of `data` is ours; padding means nothing."""
        size, stride = self.geometry.layer_bytes, self.geometry.layer_stride
        begins = range(0, self.geometry.slot_bytes, stride)
        return all(np.array_equal(data[at : at + size], self.data[at : at + size]) for at in begins)


@functools.cache
def known(number: int) -> Block:
    """The small block of a number, made once; not to be changed."""
    return Block(number)


def memory(size: int, *, aligned: bool = True) -> Bytes:
    """Page-aligned memory, or memory that O_DIRECT refuses."""
    return page_buffer(size) if aligned else page_buffer(size + 4096)[8 : 8 + size]


ENGINE = os.environ.get("KVTIERD_TEST_ENGINE", "posix")
"""Engine of every test that injects none; the integration tests run all of them once more with kvikio."""


ON_A_MODEL = pytest.mark.skipif(ENGINE != "posix", reason="a model of a disk stands for every engine: once is enough")


def engine(wanted: Literal["auto", "direct", "buffered"] = "auto") -> StorageIo:
    """The engine under test."""
    if ENGINE == "posix":
        return PosixIo(wanted)
    from kvtierd.storage.io_kvikio import KvikioIo
    from kvtierd.storage.kvikio_trial import Verdict

    return KvikioIo(wanted, trial=lambda _: Verdict(why="the driver is a stub"))


def settings(directory: Path, **fields: Any) -> Nvme:
    given = {"capacity": 4 * MIB, "segment_bytes": 256 * KIB, **fields}
    return Nvme(directory=str(directory), **given)


@contextlib.asynccontextmanager
async def opened(
    directory: Path, io: StorageIo | None = None, **fields: Any
) -> AsyncIterator[tuple[SegmentStore, Recovered]]:
    store = SegmentStore(settings(directory, **fields), clock=ManualClock(), io=io or engine())
    found = await store.open()
    try:
        yield store, found
    finally:
        await store.close()


async def put(store: SegmentStore, *blocks: Block) -> list[Extent]:
    """Store blocks that must all succeed."""
    for block in blocks:
        store.register(block.digest, block.space)
    extents = []
    for result in await store.write([block.item() for block in blocks]):
        assert isinstance(result, Extent), result
        extents.append(result)
    return extents


async def readable(store: SegmentStore, block: Block, extent: Extent) -> bool:
    """Whether the block comes back; wrong bytes fail the test."""
    item = block.fetch(extent)
    (error,) = await store.read([item])
    if error is None:
        assert block.same(item.out), "bytes were served that are not the block's"
        assert np.array_equal(item.sums, block.sums)
    return error is None


def by_key(found: Recovered) -> dict[bytes, Extent]:
    """Recovered extents by namespace and key."""
    names = zip(found.space.tolist(), found.keys, found.extents, strict=True)
    return {found.digests[space] + key.tobytes(): extent for space, key, extent in names}


def forget_index(directory: Path) -> None:
    """Leave a store without journal and checkpoints, so that its next start scans the segments."""
    for kind in ("checkpoint", "journal"):
        for path in directory.glob(f"{kind}-*"):
            path.unlink()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


class Ledger:
    """A caller as the interface wants it: knows what it stored and forgets what it is told is going."""

    def __init__(self, store: SegmentStore) -> None:
        self.held: dict[int, tuple[Block, Extent]] = {}
        self.told: list[int] = []
        store.on_reclaim(self.forget)

    def forget(self, gone: list[tuple[int, Extent]]) -> None:
        for tag, extent in gone:
            self.told.append(tag)
            block, held = self.held.pop(tag)
            assert held == extent, f"block {block.tag} was announced at a place where it never was"

    async def put(self, store: SegmentStore, *blocks: Block) -> None:
        for block, extent in zip(blocks, await put(store, *blocks), strict=True):
            self.held[block.tag] = block, extent
