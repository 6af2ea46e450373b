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

from kvtierd.core.geometry import Geometry
from kvtierd.gpu.attend import CODED, DTYPE_CODES, Array, Blocks
from kvtierd.gpu.kernels.attention_common import LOAD_BYTES, NO_SCALES, NUMBERS, SIGNATURE, TILES, WIDTHS, shrink
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


def has_kernels(k_dim: int, v_dim: int) -> bool:
    """Whether blocks of these dims can be computed on. Kernels of any multiples of 16 could be made, but none that was
    compiled and bounded beforehand."""
    return (k_dim, v_dim) in {*DIMS, LATENT}


def choose(dtype: str, k_dim: int, v_dim: int, group: int) -> Variant:
    """The variant for blocks of a dtype. Raises ValueError for dims that have none."""
    if dtype not in WIDTHS:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(WIDTHS)}")
    if not has_kernels(k_dim, v_dim):
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


def kernels_for(geometry: Geometry, *, lossy: bool) -> tuple[Kernel, ...]:
    """All that queries over such blocks may be computed with, whatever their heads; blocks may be in FP8 where `lossy`.

    Those of the groups that are usual come first. Empty for blocks that have no kernels.
    """
    v_dim = geometry.v_dim or LATENT[1]
    if geometry.dtype not in WIDTHS or not has_kernels(geometry.k_dim, v_dim):
        return ()
    dtypes = (geometry.dtype, "fp8_e4m3") if lossy else (geometry.dtype,)
    variants = [choose(dtype, geometry.k_dim, v_dim, group) for group in (4, 1, 16, 2, 3) for dtype in dtypes]
    return (MERGE, *(kernel_for(variant) for variant in dict.fromkeys(variants)))


def _merge(
    tops: Any, totals: Any, sums: Any, splits: int, v_dim: int, top: Any, total: Any, summed: Any
) -> None:  # one thread block a row
    """Add splits [splits, rows] to a carried top and total [rows] and sums [rows, v_dim].

    The common maximum is found first: then no addition waits for the one before, and loads are under way together.
    """
    row, rows = cuda.blockIdx.x, cuda.gridDim.x
    old_top, old_total = top[row], total[row]
    cuda.syncthreads()  # all have read them before the first thread writes
    best = old_top
    for split in range(splits):
        best = max(best, tops[split * rows + row])
    ours = shrink(old_top, best)
    for i in range(cuda.threadIdx.x, v_dim, cuda.blockDim.x):
        value = summed[row * v_dim + i] * ours
        for split in range(splits):
            at = split * rows + row
            value += sums[at * v_dim + i] * shrink(tops[at], best)
        summed[row * v_dim + i] = value
    if cuda.threadIdx.x == 0:
        whole = old_total * ours
        for split in range(splits):
            whole += totals[split * rows + row] * shrink(tops[split * rows + row], best)
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


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """A launch over blocks: its `columns` in the order of `SIGNATURE` (offsets to numbers), and what it fills in."""

    variant: Variant
    grid: tuple[int, int, int]
    columns: tuple[Array, ...]
    splits: int
    rows: int

    @property
    def sums(self) -> int:
        """Elements of its sums; of tops and totals each there are splits * rows."""
        return self.splits * self.rows * self.variant.v_dim


def describe(variant: Variant, base: int, blocks: Blocks, numbers: Array, blocks_a_split: int) -> Launch:
    """A launch over blocks of the variant's dtype, whose addresses are those that the device sees.

    `base` is the address of the first byte of the kernel's `memory`. numbers: int64 [NUMBERS]; TILES is filled in.
    Raises ValueError for blocks of another dtype, and for blocks that do not lie on multiples of 16 bytes.
    """
    code = DTYPE_CODES[variant.dtype]
    if not ((blocks.dtypes == code) | (blocks.dtypes == (CODED if variant.dtype == "fp8_e4m3" else code))).all():
        raise ValueError(f"blocks of another dtype than {variant.dtype} are among those of a launch")
    if numbers.shape != (NUMBERS,):
        raise ValueError(f"numbers have shape {numbers.shape}; ({NUMBERS},) is wanted")
    heads, group, queries = (int(number) for number in numbers[:3])
    bounds = np.append(np.arange(0, len(blocks), blocks_a_split), len(blocks)).astype(np.int64)
    offsets = (blocks.addresses - np.uint64(base)).view(np.int64)
    if (blocks.addresses % np.uint64(LOAD_BYTES)).any():
        raise ValueError(f"a block does not lie on a multiple of {LOAD_BYTES} bytes")
    scales = np.where(blocks.scales == 0, NO_SCALES, (blocks.scales - np.uint64(base)).view(np.int64))
    described = numbers.copy()
    described[TILES] = tiles = tiles_of(variant, group)
    return Launch(
        variant=variant,
        grid=(bounds.size - 1, heads * queries * tiles, variant.v_dim // variant.part),
        columns=(offsets, scales, blocks.positions, blocks.tokens, bounds, described),
        splits=bounds.size - 1,
        rows=heads * group * queries,
    )


def tiles_of(variant: Variant, group: int) -> int:
    """Thread blocks that share the query heads of a KV head at one position."""
    return -(-group // variant.rows)


def run_splits(
    variant: Variant, memory: Any, base: int, q: Any, blocks: Blocks, numbers: Array, cap: float, blocks_a_split: int,
    *, threads: int = THREADS, place: Any = np.ascontiguousarray, stream: Any = 0,
) -> tuple[Any, Any, Any, int]:  # fmt: skip
    """`describe` and launch; returns tops, totals, sums and how many splits they have. For tests and times.

    memory: uint8 array on the device whose first byte has address `base`. q: float32 [heads * queries * group * k_dim]
    on the device. `place` puts an array on the device (`cuda.to_device`).
    """
    launch = describe(variant, base, blocks, numbers, blocks_a_split)
    tops, totals = (place(np.empty(launch.splits * launch.rows, np.float32)) for _ in range(2))
    sums = place(np.empty(launch.sums, np.float32))
    columns = [place(array) for array in launch.columns]
    arguments = (memory, q, *columns, np.float32(cap), tops, totals, sums)
    kernel_for(variant).launch(launch.grid, *arguments, threads=threads, stream=stream)
    return tops, totals, sums, launch.splits


__all__ = [
    "ALL",
    "MERGE",
    "Launch",
    "Variant",
    "choose",
    "describe",
    "has_kernels",
    "kernel_for",
    "kernels_for",
    "run_splits",
    "tiles_of",
]
