"""What the encoder works on between memory and codes: lanes of its groups, and keys of a layer rotated."""

from __future__ import annotations

import numpy as np

from kvtierd.gpu.host_kernels.codec_vectors import LANE_WORDS, LANES
from kvtierd.gpu.host_kernels.e4m3 import BF16, FP16
from kvtierd.gpu.host_kernels.rotation import rotate_bf16, rotate_fp16, rotate_fp32
from kvtierd.gpu.host_kernels.rotation_quick import QUICK_LANES, rotate_columns
from kvtierd.index.jit import Word, helper

_LINE_BYTES = 64


@helper
def row_of(lanes: Word, group: Word) -> Word:
    """Where the lanes of a group lie. An address and no view: views are counted, in steps that wait for all stores."""
    return lanes.ctypes.data + np.uint64(4 * LANE_WORDS * group)


@helper
def lane_memory(groups):  # type: ignore[no-untyped-def]
    """Zeros, uint32 [groups, LANE_WORDS], whose vectors are whole cache lines.

    A vector on two lines is slow to come back, and many times slower while codes are on their way past the caches.
    """
    count = groups * LANE_WORDS
    memory = np.zeros(count + LANES, np.uint32)
    skipped = (_LINE_BYTES - memory.ctypes.data % _LINE_BYTES) % _LINE_BYTES // 4
    return memory[skipped : skipped + count].reshape(groups, LANE_WORDS)


@helper
def words(count):  # type: ignore[no-untyped-def]
    """Room for bf16, uint16 [count], whose vectors are whole cache lines."""
    memory = np.empty(count + _LINE_BYTES // 2, np.uint16)
    skipped = (_LINE_BYTES - memory.ctypes.data % _LINE_BYTES) % _LINE_BYTES // 2
    return memory[skipped : skipped + count]


@helper
def rotate(kind: Word, source: Word, first: Word, keys: Word, part: Word) -> None:
    """Keys of a layer, from element `first` of the source on, to rotated ones."""
    if kind == BF16:
        rotate_bf16(source, first, keys, 0, part.count, part.dim, part.rotation)
    elif kind == FP16:
        rotate_fp16(source, first, keys, 0, part.count, part.dim, part.rotation)
    else:
        rotate_fp32(source, first, keys, 0, part.count, part.dim, part.rotation)


@helper
def rotate_quickly(source, first, keys, part, lanes):  # type: ignore[no-untyped-def]
    """Keys of bf16 to rotated ones whose denormals are zeros, and the largest magnitudes of the groups into the lanes.

    What comes of NaN and Inf is of use only for knowing that they are there.
    """
    step = part.dim // part.rotation
    for run in range(part.runs):
        for group in range(part.groups):
            begin = group * part.group_stride + run * part.run_stride
            for vector in range(begin, begin + part.length, part.dim):
                for at in range(vector, vector + step, QUICK_LANES):
                    rotate_columns(source, first + at, keys, at, step, row_of(lanes, group))
