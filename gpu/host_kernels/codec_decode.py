"""FP8 on the CPU: codes and scales of a block's layers back to elements. See `codec` for parts, groups and runs."""

from __future__ import annotations

import numpy as np
from numba import types

from kvtierd.gpu.host_kernels.codec_form import F4, FORM, LAYERS, PART, U1, U2, U4
from kvtierd.gpu.host_kernels.codec_vectors import LANES, TABLE_LOOKUPS, decode_run
from kvtierd.gpu.host_kernels.e4m3 import BF16, FP16, FP32, NAN_CODE, e4m3_values, nan_of, narrow
from kvtierd.gpu.host_kernels.rotation import back_to_bf16, back_to_fp16, back_to_fp32
from kvtierd.index.jit import Word, compiled, helper

_VALUES = e4m3_values()


@helper
def _fill(kind: Word, tables: Word, scales: Word, groups: Word) -> None:
    """All 256 results of each group: then NaN, rounding and saturation cost nothing an element."""
    for group in range(groups):
        for code in range(256):
            is_nan = code & NAN_CODE == NAN_CODE
            tables[group, code] = nan_of(kind, code) if is_nan else narrow(kind, _VALUES[code] * scales[group])


@helper
def _decode_run(kind: Word, codes: Word, target: Word, table: Word, at: Word, end: Word) -> None:
    """Codes at..end to the same elements of the target."""
    if TABLE_LOOKUPS and kind != FP32:
        decode_run(codes, target, table, at, end, kind == FP16)
        at = at + (end - at) // (2 * LANES) * (2 * LANES)
    for i in range(at, end):
        target[i] = table[codes[i]]


@helper
def _decode(kind, codes, target, scales, part, tables):  # type: ignore[no-untyped-def]
    _fill(kind, tables, scales, part.groups)
    for run in range(part.runs):
        for group in range(part.groups):
            at = group * part.group_stride + run * part.run_stride
            _decode_run(kind, codes, target, tables[group], at, at + part.length)


@helper
def _decode_keys(kind, codes, target, scales, part, tables, keys):  # type: ignore[no-untyped-def]
    """Rotated keys are whole numbers of bf16: e4m3 times a power of two. Run by run, while the caches have them."""
    _fill(BF16, tables, scales, part.groups)
    for run in range(part.runs):
        for group in range(part.groups):
            at = group * part.group_stride + run * part.run_stride
            if kind == BF16:
                _decode_run(BF16, codes, target, tables[group], at, at + part.length)
                back_to_bf16(target, at, target, at, part.length, part.dim, part.rotation)
            else:
                some = codes[at : at + part.length]
                _decode_run(BF16, some, keys, tables[group], 0, part.length)
                if kind == FP16:
                    back_to_fp16(keys, 0, target, at, part.length, part.dim, part.rotation)
                else:
                    back_to_fp32(keys, 0, target, at, part.length, part.dim, part.rotation)


@helper
def _decode_layers(kind, codes, floats, target, first, end, form, k, v, tables):  # type: ignore[no-untyped-def]
    rotated = k.rotation > 1
    key_tables = np.empty((k.groups if rotated else 0, 256), np.uint16)
    keys = np.empty(k.length if rotated else 0, np.uint16)
    for layer in range(first, end):
        begin, code_begin = layer * form.element_stride, layer * form.code_stride
        target[begin + form.elements : begin + form.element_stride] = 0
        for part in (k, v):
            columns = code_begin // 4 + form.scales + part.first_group
            some = codes[code_begin + part.begin : code_begin + part.begin + part.count]
            place = target[begin + part.begin : begin + part.begin + part.count]
            scales = floats[columns : columns + part.groups]
            if part.rotation > 1:
                _decode_keys(kind, some, place, scales, part, key_tables, keys)
            elif part.count > 0:
                _decode(kind, some, place, scales, part, tables)


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
