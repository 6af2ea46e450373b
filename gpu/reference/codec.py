"""FP8 by its definition, in NumPy's float64: slow, plain, and sharing no code with the kernels.

A code is found by its distance to all values that there are, not by arithmetic on bits. float64 holds every value,
scaled value and error of the formats here exactly.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Bytes
from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import rotation

Values = npt.NDArray[np.float64]

_MIN_EXPONENT = -100
_MAX = 448.0
_FINITE_MAX = {"bf16": float.fromhex("0x1.fep127"), "fp16": 65504.0, "fp32": float(np.finfo(np.float32).max)}


def _sizes() -> Values:
    """Magnitudes of the codes 0x00 to 0x7e, which grow with the code."""
    small = [mantissa * 2.0**-9 for mantissa in range(8)]
    large = [(1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)]
    return np.array([*small, *large][:127])


SIZES = _sizes()


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A group: codes as its values, the scale, the two errors (of what float32 rounds to)."""

    codes: npt.NDArray[np.uint8]
    scale: float
    relative_l2: float
    largest_error: float


def encode_group(values: Values) -> Encoded:
    """Codes and errors of the elements that share a scale."""
    finite = np.isfinite(values)
    scale = scale_of(float(np.max(np.abs(values[finite]), initial=0.0)))
    with np.errstate(invalid="ignore"):  # of signalling NaN, which half floats may hold
        codes = codes_of(values / scale)
        error = np.abs(np.where(finite, values - values_of(codes) * scale, 0.0))
    squares = float(np.sum(np.where(finite, values, 0.0) ** 2))
    if np.isinf(values).any():
        return Encoded(codes, scale, math.inf, math.inf)
    if squares == 0.0:
        return Encoded(codes, scale, 0.0, 0.0)
    largest = float(np.max(np.abs(values[finite])))
    return Encoded(codes, scale, math.sqrt(float(np.sum(error**2)) / squares), float(np.max(error)) / largest)


def scale_of(largest: float) -> float:
    """The smallest power of two with which `largest` is at most 448."""
    if largest == 0.0:
        return 1.0
    exponent = _MIN_EXPONENT
    while largest / 2.0**exponent > _MAX:
        exponent += 1
    return 2.0**exponent


def codes_of(values: Values) -> npt.NDArray[np.uint8]:
    """The nearest codes; of two that are equally near the even one."""
    size = np.minimum(np.abs(values), _MAX)
    upper = np.clip(np.searchsorted(SIZES, size), 1, 126)
    below, above = size - SIZES[upper - 1], SIZES[upper] - size
    take_lower = (below < above) | ((below == above) & (upper % 2 == 1))
    codes = np.where(np.isnan(values), 0x7F, np.where(take_lower, upper - 1, upper))
    return (codes | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def values_of(codes: npt.NDArray[np.uint8]) -> Values:
    """What codes stand for."""
    sizes = np.append(SIZES, np.nan)[codes & 0x7F]
    values: Values = np.where(codes & 0x80, -sizes, sizes)
    return values


def elements(raw: npt.NDArray[np.unsignedinteger[Any]], dtype: str) -> Values:
    """The values of elements that are given as unsigned integers of their size."""
    if dtype == "bf16":
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.view(np.float16 if dtype == "fp16" else np.float32).astype(np.float64)


def layer_groups(block: Bytes, geometry: Geometry, layer: int, *, turned: bool = True) -> list[Values]:
    """The values of each group of a layer of a block in slot form, K heads then V heads, in the order of memory.

    `turned`: those that are encoded, with keys rotated.
    """
    element = {"bf16": np.uint16, "fp16": np.uint16, "fp32": np.uint32}[geometry.dtype]
    begin = layer * geometry.layer_stride
    raw = block[begin : begin + geometry.layer_bytes].view(element)
    values = elements(raw, geometry.dtype)
    split = geometry.block_size * geometry.kv_heads * geometry.k_dim
    found: list[Values] = []
    for part, dim in ((values[:split], geometry.k_dim), (values[split:], geometry.v_dim)):
        if dim == 0:
            continue
        if geometry.layout == "hnd":
            heads = part.reshape(geometry.kv_heads, geometry.block_size, dim)
        else:
            heads = part.reshape(geometry.block_size, geometry.kv_heads, dim).swapaxes(0, 1)
        if turned and not found and rotation(geometry) > 1:
            heads = rounded_to_bf16(rotated(heads, rotation(geometry)))
        found += [head.reshape(-1) for head in heads]
    return found


def rotated(vectors: npt.NDArray[np.floating[Any]], n: int) -> npt.NDArray[np.float32]:
    """Vectors [..., dim], `n` rows of each spread over one another; in float32, in the order that the form defines.

    The same again gives the vectors back, but for rounding.
    """
    half = n // 2
    with np.errstate(invalid="ignore", over="ignore"):
        rows = vectors.astype(np.float32).reshape(*vectors.shape[:-1], n, -1) * np.float32(1 / math.sqrt(n))
        while half:
            pairs = rows.reshape(*vectors.shape[:-1], n // (2 * half), 2, half, -1)
            a, b = pairs[..., 0, :, :], pairs[..., 1, :, :]
            rows = np.stack([a + b, a - b], axis=-3).reshape(rows.shape)
            half //= 2
    return rows.reshape(vectors.shape)


def rounded_to_bf16(values: npt.NDArray[np.float32]) -> Values:
    """The nearest bf16 of each, ties to even."""
    bits = values.view(np.uint32)
    up = np.where(np.isnan(values), np.uint32(0), (bits >> 16 & 1) + np.uint32(0x7FFF))
    with np.errstate(invalid="ignore"):  # a NaN that is cut off may be a signalling one
        return ((bits + up) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def decoded(codes: npt.NDArray[np.uint8], scale: float, dtype: str) -> Values:
    """Values of codes, rounded to the dtype (exactly, where the scale is ours) and kept within its range."""
    exact = values_of(codes) * scale
    limit = _FINITE_MAX[dtype]
    return np.clip(exact, -limit, limit)


def decoded_keys(codes: npt.NDArray[np.uint8], scale: float, geometry: Geometry) -> Values:
    """As `decoded`, of a group of rotated keys: turned back, rounded to the dtype, and kept within its range."""
    if (n := rotation(geometry)) == 1:
        return decoded(codes, scale, geometry.dtype)
    turned = decoded(codes, scale, "bf16").reshape(-1, geometry.k_dim)
    back = rotated(turned, n).reshape(-1)
    limit = _FINITE_MAX[geometry.dtype]
    if geometry.dtype == "bf16":
        return np.clip(rounded_to_bf16(back), -limit, limit)
    exact = np.clip(back.astype(np.float64), -limit, limit)
    return exact.astype(np.float16).astype(np.float64) if geometry.dtype == "fp16" else exact
