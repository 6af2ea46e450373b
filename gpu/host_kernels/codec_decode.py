"""FP8 on the CPU: codes and scales of a block's layers back to elements. See `codec` for parts, groups and runs."""

from __future__ import annotations

import numpy as np
from numba import types

from kvtierd.gpu.host_kernels.codec_form import F4, FORM, LAYERS, PART, U1, U2, U4
from kvtierd.gpu.host_kernels.codec_vectors import LANES, TABLE_LOOKUPS, decode_run
from kvtierd.gpu.host_kernels.e4m3 import BF16, FP16, FP32, NAN_CODE, e4m3_values, nan_of, narrow
from kvtierd.index.jit import compiled, helper

_VALUES = e4m3_values()


@helper
def _decode(kind, codes, target, scales, groups, runs, length, group_stride, run_stride, tables):  # type: ignore[no-untyped-def]
    """All 256 results of each group are computed first: then NaN, rounding and saturation cost nothing an element."""
    for group in range(groups):
        for code in range(256):
            is_nan = code & NAN_CODE == NAN_CODE
            tables[group, code] = nan_of(kind, code) if is_nan else narrow(kind, _VALUES[code] * scales[group])
    for run in range(runs):
        for group in range(groups):
            at = group * group_stride + run * run_stride
            end = at + length
            if TABLE_LOOKUPS and kind != FP32:
                decode_run(codes, target, tables[group], at, end, kind == FP16)
                at = at + (end - at) // (2 * LANES) * (2 * LANES)
            for i in range(at, end):
                target[i] = tables[group, codes[i]]


@helper
def _decode_layers(kind, codes, floats, target, first, end, form, k, v, tables):  # type: ignore[no-untyped-def]
    for layer in range(first, end):
        begin, code_begin = layer * form.element_stride, layer * form.code_stride
        target[begin + form.elements : begin + form.element_stride] = 0
        for part in (k, v):
            scales = code_begin // 4 + form.scales + part.first_group
            if part.count > 0:
                _decode(
                    kind,
                    codes[code_begin + part.begin : code_begin + part.begin + part.count],
                    target[begin + part.begin : begin + part.begin + part.count],
                    floats[scales : scales + part.groups],
                    part.groups, part.runs, part.length, part.group_stride, part.run_stride, tables,
                )  # fmt: skip


@compiled(types.void(U1, F4, U2, *LAYERS, FORM, PART, PART))
def decode_bf16(codes, floats, target, first, end, form, k, v):  # type: ignore[no-untyped-def]
    """Decode layers first..end of the FP8 form, which `floats` has as float32, to bf16."""
    _decode_layers(BF16, codes, floats, target, first, end, form, k, v, np.empty((form.groups, 256), np.uint16))


@compiled(types.void(U1, F4, U2, *LAYERS, FORM, PART, PART))
def decode_fp16(codes, floats, target, first, end, form, k, v):  # type: ignore[no-untyped-def]
    """Decode layers to fp16."""
    _decode_layers(FP16, codes, floats, target, first, end, form, k, v, np.empty((form.groups, 256), np.uint16))


@compiled(types.void(U1, F4, U4, *LAYERS, FORM, PART, PART))
def decode_fp32(codes, floats, target, first, end, form, k, v):  # type: ignore[no-untyped-def]
    """Decode layers to fp32."""
    _decode_layers(FP32, codes, floats, target, first, end, form, k, v, np.empty((form.groups, 256), np.uint32))
