"""What tortured clients store: blocks whose bytes are made from their keys alone, so that everybody knows the truth."""

from __future__ import annotations

import numpy as np

from kvtierd import Geometry, Namespace, block_keys
from kvtierd.core.checksum import Bytes
from kvtierd.core.keys import Keys

SHAPE = Geometry(block_size=64, layers=4, kv_heads=1, k_dim=64, v_dim=64)
"""64 KiB a block in 4 layers."""
SPACE = Namespace(model="torture", geometry=SHAPE)


def keys_of(prompt: int, blocks: int) -> Keys:
    """Keys of the first blocks of one of many prompts, [blocks, 32] uint8."""
    tokens = np.arange(blocks * SHAPE.block_size, dtype=np.uint32) + prompt * 1_000_003
    return block_keys(SPACE.digest(), tokens, SHAPE.block_size)


def content_of(keys: Keys) -> Bytes:
    """The right bytes, [n, block_bytes] uint8: bf16 numbers of ordinary size, so that attention over them is finite."""
    rows = []
    for key in keys:
        rng = np.random.default_rng(int.from_bytes(key.tobytes()[:8], "little"))
        numbers = rng.integers(0x3F00, 0x4000, SHAPE.block_bytes // 2, np.uint16)
        rows.append(numbers.view(np.uint8))
    return np.stack(rows) if rows else np.empty((0, SHAPE.block_bytes), np.uint8)


def wrong_blocks(blocks: Bytes, keys: Keys) -> list[int]:
    """Which of the blocks do not have the bytes that their keys say."""
    if not len(blocks):
        return []
    return np.flatnonzero((blocks != content_of(keys[: len(blocks)])).any(axis=1)).tolist()
