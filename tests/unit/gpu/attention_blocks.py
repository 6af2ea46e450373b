"""Blocks of random KV of any dtype and layout in memory of their own, and what the oracle makes of them."""

from __future__ import annotations

import dataclasses

import numpy as np

from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import rotation
from kvtierd.gpu.attend import CODED, DTYPE_CODES, Blocks
from kvtierd.gpu.host_kernels.attention_memory import E4M3_VALUES
from kvtierd.gpu.reference.attention import reference_attention

POISON = 0xFF
"""What no kernel may read: NaN in every dtype."""


def bits_of(values, dtype):
    """Elements of a dtype as bytes, and what they stand for in float64."""
    if dtype == "fp8_e4m3":
        codes = nearest_e4m3(values)
        return codes, E4M3_VALUES[codes].astype(np.float64)
    if dtype == "bf16":
        bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return bits.view(np.uint8), (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    kept = values.astype(np.float16 if dtype == "fp16" else np.float32)
    return kept.view(np.uint8), kept.astype(np.float64)


def nearest_e4m3(values):
    """Codes of the values nearest to those given, saturating; NaN is 0x7f."""
    order = np.argsort(E4M3_VALUES[:127])
    table = E4M3_VALUES[:127][order].astype(np.float64)
    middle = (table[1:] + table[:-1]) / 2
    codes = order[np.searchsorted(middle, np.abs(values))].astype(np.uint8)
    codes = np.where(np.isnan(values), 0x7F, codes)
    return (codes | (np.signbit(values).astype(np.uint8) << 7)).astype(np.uint8)


def turned(vectors, n):
    """float64 vectors [..., dim] times Hadamard's matrix over `n` channels at a distance of dim / n."""
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    rows = vectors.reshape(*vectors.shape[:-1], n, -1)
    return (np.moveaxis(np.tensordot(matrix, rows, (1, -2)), 0, -2) / np.sqrt(n)).reshape(vectors.shape)


@dataclasses.dataclass
class Kv:
    """A sequence's blocks: memory (which must outlive `blocks`), and its keys and values in float64."""

    geometry: Geometry
    blocks: Blocks
    memory: list
    keys: list
    values: list
    v_dim: int

    def reference(self, query):
        latest = None if query.position >= 1 << 61 else query.position
        q = query.q
        if q.dtype == np.uint16:
            q = (q.astype(np.uint32) << 16).view(np.float32)
        return reference_attention(
            q,
            [(k, v, int(at)) for k, v, at in zip(self.keys, self.values, self.blocks.positions, strict=True)],
            scale=query.scale,
            v_dim=self.v_dim,
            position=latest,
            window=query.window,
            soft_cap=query.soft_cap,
            sinks=query.sinks,
        )


def make_kv(rng, geometry, length, dtypes=("bf16",), v_dim=0, draw=None, shift=0):
    """Blocks of `length` tokens; each of one of the dtypes, or "coded", in turn; unused bytes are poison.

    `draw(rng, shape)` makes the numbers; `shift` moves blocks off alignment by so many bytes.
    """
    g = geometry
    draw = draw or (lambda rng, shape: rng.standard_normal(shape))
    v_dim = g.v_dim or v_dim
    count = -(-length // g.block_size)
    memory, keys, values, rows = [], [], [], []
    for index in range(count):
        tokens = min(g.block_size, length - index * g.block_size)
        dtype = dtypes[index % len(dtypes)]
        coded = dtype == "coded"  # as the codec makes them: FP8, keys rotated
        dtype = "fp8_e4m3" if coded else dtype
        width = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 1}[dtype]
        elements = g.block_size * g.kv_heads * (g.k_dim + g.v_dim)
        groups = 2 * g.kv_heads
        raw = np.full(shift + elements * width + 4 * groups, POISON, np.uint8)
        scales = (2.0 ** rng.integers(-6, 3, groups)).astype(np.float32) if dtype == "fp8_e4m3" else np.ones(groups)
        parts = []
        start = shift
        for dim, first in ((g.k_dim, 0), (g.v_dim, g.kv_heads)):
            numbers = draw(rng, (tokens, g.kv_heads, dim))
            scale = scales[first : first + g.kv_heads].astype(np.float64)[None, :, None]
            content, meant = bits_of(np.ascontiguousarray(numbers / scale), dtype)
            found = meant.reshape(numbers.shape) * scale
            parts.append(turned(found, rotation(g)) if coded and first == 0 else found)
            size = g.block_size * g.kv_heads * dim * width
            place = raw[start : start + size]
            content = content.reshape(tokens, g.kv_heads, dim * width)
            if g.layout == "nhd":
                place.reshape(g.block_size, g.kv_heads, dim * width)[:tokens] = content
            else:
                place.reshape(g.kv_heads, g.block_size, dim * width)[:, :tokens] = content.transpose(1, 0, 2)
            start += size
        raw[start : start + 4 * groups] = scales.astype(np.float32).view(np.uint8)
        memory.append(raw)
        keys.append(parts[0])
        values.append(parts[1] if g.v_dim else parts[0][:, :, :v_dim])
        address = raw.ctypes.data + shift
        scale_address = raw.ctypes.data + start if dtype == "fp8_e4m3" else 0
        rows.append((address, scale_address, CODED if coded else DTYPE_CODES[dtype], tokens, index * g.block_size))
    columns = list(zip(*rows, strict=True))
    blocks = Blocks.make(columns[0], scales=columns[1], dtypes=columns[2], tokens=columns[3], positions=columns[4])
    return Kv(geometry, blocks, memory, keys, values, v_dim)
