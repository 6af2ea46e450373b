"""Layer sums of several blocks at once, for threads that verify: one call, and no GIL while it hashes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from kvtierd.core.checksum import Bytes, Sums
from kvtierd.index.xxh3 import SHORTEST, sums_of
from kvtierd.storage.buffers import address
from kvtierd.storage.layout import BlockShape


def sums_of_blocks(blocks: Sequence[Bytes], shape: BlockShape) -> Sums:
    """Layer sums, [n, layers] u64, of blocks in the form of `shape` (`[payload_bytes]` uint8 each).

    The same as `kvtierd.core.checksum.layer_sums` of each. Raises ValueError for memory that is not as long.
    """
    for block in blocks:
        if block.size != shape.payload_bytes:
            raise ValueError(f"block has {block.size} bytes; {shape.payload_bytes} are wanted")
    if shape.layer_bytes < SHORTEST or not all(block.flags.c_contiguous for block in blocks):
        return np.array([_one_by_one(block, shape) for block in blocks], np.uint64).reshape(len(blocks), shape.layers)
    begins = np.array([address(block) for block in blocks], np.uint64)
    steps = np.arange(shape.layers, dtype=np.uint64) * np.uint64(shape.layer_stride)
    return sums_of((begins[:, None] + steps).reshape(-1), shape.layer_bytes).reshape(len(blocks), shape.layers)


def _one_by_one(block: Bytes, shape: BlockShape) -> list[int]:
    parts = np.ascontiguousarray(block).reshape(shape.layers, shape.layer_stride)[:, : shape.layer_bytes]
    return [xxhash.xxh3_64_intdigest(part.data) for part in parts]
