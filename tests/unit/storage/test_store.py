"""The store's ordinary life: what is written comes back, also after reopening."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.storage.blocks import LARGE, ODD, Block, by_key, namespace, opened, put, readable, run


@pytest.mark.parametrize("geometry", [ODD, LARGE], ids=["odd", "large"])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
def test_block_comes_back_byte_for_byte_after_reopening(tmp_path: Path, geometry, aligned: bool) -> None:
    async def check() -> None:
        blocks = [Block(n, namespace(geometry), aligned=aligned) for n in range(5)]
        async with opened(tmp_path, capacity=0, segment_bytes=8 << 20) as (store, _):
            extents = await put(store, *blocks)
            items = [block.fetch(extent, aligned=aligned) for block, extent in zip(blocks, extents, strict=True)]
            assert await store.read(items) == [None] * 5
            assert all(block.same(item.out) for block, item in zip(blocks, items, strict=True))
        async with opened(tmp_path, capacity=0, segment_bytes=8 << 20) as (store, found):
            assert found.dropped == 0
            assert found.namespaces == {blocks[0].digest: blocks[0].space}
            assert found.block_sums.tolist() == [block.block_sum for block in blocks]
            places = by_key(found)
            for block in blocks:
                assert await readable(store, block, places[block.digest + block.key])

    run(check)
