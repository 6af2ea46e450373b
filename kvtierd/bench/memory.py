"""`kvtierctl bench memory`: how much of the memory taken holds KV, against contiguous allocation of the same requests.

Two mixes: 8 requests of 1k tokens where 2k is the longest, and 16 of 0.5 to 4k tokens, evenly spread. The baseline is
`naive_kv`: an allocation for each request at the longest length, and one that grows by reallocation, whose peak, old
and new side by side, is told too. Ours stores the same tokens through a daemon, the last block of each request padded,
and counts every slot in use, and the daemon's tables beside them. All read back what they stored and compare it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvtierd.bench.naive_kv import GROWTH_TOKENS, Array, ContiguousKv, token_bytes, use_of
from kvtierd.bench.options import Options, need_memory
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.bench.workload import daemon_and_client, expect, namespace
from kvtierd.core.geometry import Geometry
from kvtierd.core.keys import block_keys
from kvtierd.core.units import MIB
from kvtierd.protocol.client import Client

SHAPE = Geometry(block_size=128, layers=4, kv_heads=2, k_dim=128, v_dim=128)
"""4 KiB a token over 4 layers."""
BLOCK_SIZES = (128, 64, 256, 512)
TABLE_BYTES = 128
"""A block: its row of 64 bytes, its place in the page table, and its slot's columns."""
MIXES: dict[str, tuple[list[int], int]] = {
    "8 requests of 1k tokens, 2k the longest": ([1024] * 8, 2048),
    "16 requests of 0.5 to 4k tokens": (np.linspace(512, 4096, 16).astype(int).tolist(), 4096),
}
CLAIMED = {"8 requests of 1k tokens, 2k the longest": 0.5, "16 requests of 0.5 to 4k tokens": 0.187}
"""Of contiguous allocation, in the founding document."""
CLAIMED_LONGEST = 12_288
"""The longest length at which 16 requests of 0.5 to 4k tokens use 18.7% (2,304 tokens in the mean)."""
GOAL = ">= 0.96"


def rows(options: Options) -> Iterator[Row]:
    """Measure both mixes; `quick` leaves out the block sizes that are no default."""
    need_memory(512 * MIB)
    settings = {"nvme__directory": "", "gpu__capacity": 0, "host__capacity": 256 * MIB}
    for mix, (lengths, longest) in MIXES.items():
        static = contiguous(lengths, longest, 0)
        yield make_row("memory", f"{mix}: contiguous, static", static, "", reference_name="the longest of the mix")
        yield make_row("memory", f"{mix}: contiguous, grown", contiguous(lengths, longest, GROWTH_TOKENS), "")
        yield make_row("memory", f"{mix}: contiguous, grown, while it grows", _peak(lengths), "")
        if static > CLAIMED[mix] + 0.01:
            claimed = contiguous(lengths, CLAIMED_LONGEST, 0)
            yield make_row("memory", f"{mix}: contiguous, static at {CLAIMED_LONGEST:,}", claimed, "")
        for block_size in BLOCK_SIZES[: 1 if options.quick else None]:
            with (
                tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=options.directory) as folder,
                daemon_and_client(Path(folder), 1, **settings) as (_, client),
            ):
                ours = in_blocks(client, lengths, block_size)
            yield make_row(
                "memory",
                f"{mix}: blocks of {block_size} tokens",
                ours,
                "",
                goal=GOAL if block_size == BLOCK_SIZES[0] else "",
                reference_name=f"contiguous is claimed to use {CLAIMED[mix]:.1%}",
            )


def contiguous(lengths: list[int], longest: int, growth: int) -> float:
    """Share in use by contiguous allocations, filled as requests are, and read back."""
    requests = []
    for number, tokens in enumerate(lengths):
        request, kv = ContiguousKv(SHAPE, longest, growth), _content(tokens, number)
        for begin in range(0, tokens, GROWTH_TOKENS):
            request.append(kv[:, begin : begin + GROWTH_TOKENS])
        if not np.array_equal(request.saved(), kv):
            raise BenchError(f"request {number} of the baseline holds other bytes")
        requests.append(request)
    return use_of(requests, SHAPE)


def _peak(lengths: list[int]) -> float:
    """Share in use while the longest request is copied into its last allocation, the others standing by."""
    taken = [-(-tokens // GROWTH_TOKENS) * GROWTH_TOKENS for tokens in lengths]
    return sum(lengths) / (sum(taken) + max(taken) - GROWTH_TOKENS)


def in_blocks(client: Client, lengths: list[int], block_size: int) -> float:
    """Share in use by blocks in the host tier, tables included; every byte is read back."""
    shape = Geometry(
        block_size=block_size, layers=SHAPE.layers, kv_heads=SHAPE.kv_heads, k_dim=SHAPE.k_dim, v_dim=SHAPE.v_dim
    )
    handle = client.register(namespace(shape))
    blocks = 0
    for number, tokens in enumerate(lengths):
        count = -(-tokens // block_size)
        keys = block_keys(handle.digest, np.arange(count * block_size) + number * 1_000_000, block_size)
        packed = _packed(_content(tokens, number), count, shape)
        expect("stored", client.store(handle, keys, packed).stored, count)
        found = client.fetch(handle, keys)
        expect("found", found.count, count)
        if not np.array_equal(found.blocks, packed):
            raise BenchError(f"request {number} came back with other bytes")
        blocks += count
    taken = int(client.stats()["host_used_bytes"])
    if taken < blocks * shape.block_bytes:
        raise BenchError(f"the daemon says {taken} bytes for {blocks} blocks")
    return sum(lengths) * token_bytes(shape) / (taken + blocks * TABLE_BYTES)


def _packed(kv: Array, count: int, shape: Geometry) -> Array:
    """The same tokens as blocks, [count, block_bytes], the last one padded with zeros."""
    layers, tokens, width = kv.shape
    padded = np.zeros((layers, count * shape.block_size, width), np.uint8)
    padded[:, :tokens] = kv
    by_block = padded.reshape(layers, count, shape.block_size * width).swapaxes(0, 1)
    return np.ascontiguousarray(by_block).reshape(count, shape.block_bytes)


def _content(tokens: int, seed: int) -> Array:
    """KV of a request, [layers, tokens, bytes]."""
    shape = (SHAPE.layers, tokens, token_bytes(SHAPE) // SHAPE.layers)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
