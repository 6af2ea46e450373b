"""The table of CUDA attention kernels, and launching them over blocks of mixed dtypes.

Which form: tensor cores (`attention_mma`) where at least four query heads share a KV head, CUDA cores
(`attention_simt`) for smaller groups and for fp32 blocks, whose precision tensor cores would lose. Blocks of different
dtypes are different launches, whose splits the merging kernel joins like any others.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from numba import cuda

from kvtierd.gpu.attend import DTYPE_CODES, Array, Blocks
from kvtierd.gpu.kernels.attention_common import LOAD_BYTES, NUMBERS, SIGNATURE, TILES, WIDTHS, shrink
from kvtierd.gpu.kernels.attention_mma import make_mma
from kvtierd.gpu.kernels.attention_simt import make_simt
from kvtierd.gpu.kernels.registry import Kernel, register

THREADS = 128
MMA_FROM_GROUP = 4
"""Query heads of a KV head from which tensor cores are used: fewer fill too little of their rows (recipes: kernels)."""
DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))
LATENT = (576, 512)
PART_MAX = 128
"""Elements of the values that a thread block sums, where they are a multiple of it: 256 would not fit its registers."""
REGISTERS = {
    "simt": {"sm_80": 255, "*": 248},
    "mma": {"sm_80": 255, "*": 248},
}
"""By form: two thread blocks of 128 threads a multiprocessor, with a few registers to spare for another compiler."""
_MEASURED = (
    "a thread may have 255 registers; 128 threads with that many leave two thread blocks a multiprocessor, not yet "
    "weighed against fewer on a device. Before sm_90 e4m3 is taken apart by hand, which takes more"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """What a kernel is made for. `rows` query heads a thread block; `part` elements of V a thread block."""

    form: str
    dtype: str
    k_dim: int
    v_dim: int
    rows: int
    part: int

    @property
    def name(self) -> str:
        """As in the table of kernels; all that the code depends on, because reports are kept by it."""
        return f"attention_{self.form}_{self.dtype}_k{self.k_dim}_v{self.v_dim}_r{self.rows}_p{self.part}"


_CANONICAL = {
    ("simt", "bf16", 128, 1),
    ("simt", "fp8_e4m3", 128, 2),
    ("mma", "bf16", 128, 8),
    ("mma", "fp8_e4m3", 128, 8),
    ("mma", "bf16", 576, 16),
}


def choose(dtype: str, k_dim: int, v_dim: int, group: int) -> Variant:
    """The variant for blocks of a dtype. Raises ValueError for dims that have none."""
    if dtype not in WIDTHS:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(WIDTHS)}")
    if k_dim % 16 or v_dim % 16 or (k_dim, v_dim) not in {*DIMS, LATENT}:
        raise ValueError(f"K and V dims {k_dim} and {v_dim} have no CUDA kernel; there are {(*DIMS, LATENT)}")
    if dtype == "fp32" or group < MMA_FROM_GROUP:
        rows = 1 if group == 1 or k_dim > 256 else 4 if group > 2 and dtype == "fp32" else 2
        return Variant("simt", dtype, k_dim, v_dim, rows, v_dim)
    rows = 8 if group <= 8 else 16
    part = PART_MAX if v_dim % PART_MAX == 0 else v_dim
    if rows == 16 and v_dim >= 192 and k_dim <= 256 and dtype != "fp8_e4m3":
        part = PART_MAX // 2  # measured: with more, wide keys and 16 rows spill a few bytes
    return Variant("mma", dtype, k_dim, v_dim, rows, part)


@functools.cache
def kernel_for(variant: Variant) -> Kernel:
    """The variant's row in the table of kernels."""
    v = variant
    body = (
        make_simt(v.dtype, v.k_dim, v.v_dim, v.rows)
        if v.form == "simt"
        else make_mma(v.dtype, v.k_dim, v.v_dim, v.rows, v.part)
    )
    return register(
        Kernel(
            name=v.name,
            function=body,
            signature=SIGNATURE,
            threads=THREADS,
            registers=REGISTERS[v.form],
            spill_bytes=2048 if v.dtype == "fp8_e4m3" else 512,
            reason=_MEASURED,
            canonical=(v.form, v.dtype, v.k_dim, v.rows) in _CANONICAL and v.v_dim in {128, 512},
        )
    )


def _merge(
    tops: Any, totals: Any, sums: Any, splits: int, v_dim: int, top: Any, total: Any, summed: Any
) -> None:  # one thread block a row
    """Add splits [splits, rows] one after the other to a carried top and total [rows] and sums [rows, v_dim]."""
    row, rows = cuda.blockIdx.x, cuda.gridDim.x
    old_top, old_total = top[row], total[row]
    cuda.syncthreads()  # all have read them before the first thread writes
    best, whole = old_top, old_total
    for i in range(cuda.threadIdx.x, v_dim, cuda.blockDim.x):
        best, whole, value = old_top, old_total, summed[row * v_dim + i]
        for split in range(splits):
            at = split * rows + row
            new = max(best, tops[at])
            ours, theirs = shrink(best, new), shrink(tops[at], new)
            best = new
            whole = whole * ours + totals[at] * theirs
            value = value * ours + sums[at * v_dim + i] * theirs
        summed[row * v_dim + i] = value
    if cuda.threadIdx.x == 0:
        top[row], total[row] = best, whole


MERGE = register(
    Kernel(
        name="attention_merge",
        function=_merge,
        signature=(
            "void(float32[::1], float32[::1], float32[::1], int64, int64, float32[::1], float32[::1], float32[::1])"
        ),
        threads=64,
        registers={"*": 64},
        reason="a loop over a few numbers; 64 threads of it are a small part of a multiprocessor",
        canonical=True,
    )
)
ALL = tuple(
    kernel_for(variant)
    for variant in sorted(
        {
            choose(dtype, k_dim, v_dim, group)
            for dtype in WIDTHS
            for k_dim, v_dim in (*DIMS, LATENT)
            for group in (1, 2, 3, 4, 16)
        },
        key=lambda variant: variant.name,
    )
)


def run_splits(
    variant: Variant, memory: Any, base: int, q: Any, blocks: Blocks, numbers: Array, cap: float, blocks_a_split: int,
    *, threads: int = THREADS, place: Any = np.ascontiguousarray, stream: Any = 0,
) -> tuple[Any, Any, Any, int]:  # fmt: skip
    """Launch over blocks of the variant's dtype; returns tops, totals, sums and how many splits they have.

    memory: uint8 array on the device whose first byte has address `base`. q: float32 [heads * queries * group * k_dim]
    on the device. numbers: int64 [NUMBERS]. `place` puts an array on the device (`cuda.to_device`).
    Raises ValueError for blocks of another dtype, and for blocks that do not lie on multiples of 16 bytes.
    """
    if (blocks.dtypes != DTYPE_CODES[variant.dtype]).any():
        raise ValueError(f"blocks of another dtype than {variant.dtype} are among those of a launch")
    if numbers.shape != (NUMBERS,):
        raise ValueError(f"numbers have shape {numbers.shape}; ({NUMBERS},) is wanted")
    heads, group, queries = (int(number) for number in numbers[:3])
    bounds = np.append(np.arange(0, len(blocks), blocks_a_split), len(blocks)).astype(np.int64)
    splits, rows = bounds.size - 1, heads * group * queries
    offsets = (blocks.addresses - np.uint64(base)).view(np.int64)
    if (offsets % LOAD_BYTES).any():
        raise ValueError(f"a block does not lie on a multiple of {LOAD_BYTES} bytes")
    scales = np.where(blocks.scales == 0, np.int64(-1), (blocks.scales - np.uint64(base)).view(np.int64))
    tiles = -(-group // variant.rows)
    described = numbers.copy()
    described[TILES] = tiles
    tops, totals = (place(np.empty(splits * rows, np.float32)) for _ in range(2))
    sums = place(np.empty(splits * rows * variant.v_dim, np.float32))
    grid = (splits, heads * queries * tiles, variant.v_dim // variant.part)
    columns = [place(array) for array in (offsets, scales, blocks.positions, blocks.tokens, bounds, described)]
    kernel_for(variant).launch(
        grid, memory, q, *columns, np.float32(cap), tops, totals, sums, threads=threads, stream=stream
    )
    return tops, totals, sums, splits


__all__ = ["ALL", "MERGE", "Variant", "choose", "kernel_for", "run_splits"]
