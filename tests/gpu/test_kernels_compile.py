"""Every canonical kernel compiles for every architecture without a GPU, and keeps its bounds.

The full matrix is `make kernels`. Reports come from the cache folder where the sources have not changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import cuda

from kvtierd.gpu.kernels import primitives as p
from kvtierd.gpu.kernels.compile import compile_kernel, reports, violations
from kvtierd.gpu.kernels.registry import ARCHITECTURES, Architecture, Kernel, all_kernels, architecture_name

CANONICAL = tuple(kernel for kernel in all_kernels() if kernel.canonical)


@p.device_function
def _half(value: Any) -> Any:
    return value * np.float32(0.5)


def _uses_every_primitive(source: Any, target: Any) -> None:
    thread = cuda.threadIdx.x
    byte = thread * 16
    stage = p.shared_bytes(4096)
    p.copy_async(stage, byte, source, byte, 16)
    p.copy_commit()
    p.copy_wait(0)
    p.sync_warp()
    a, b = p.ldmatrix(stage, byte), p.ldmatrix_transposed(stage, byte)
    c = p.mma_bf16(a, (b[0], b[1]), (np.float32(0), np.float32(0), np.float32(0), np.float32(0)))
    d = p.mma_f16(a, (b[2], b[3]), c)
    words = p.load_words(source, byte)
    low, high = p.f16_of_e4m3(words[0])
    f0, f1 = p.floats_of_f16(low)
    g0, g1 = p.floats_of_bf16(high)
    x = p.exchange_f32(p.exp2(f0 + _half(f1)), 1) + p.broadcast_f32(g0, 3) + p.float_of(p.bits_of(g1) + 1)
    y = p.exchange_u32(p.load_pair(source, thread * 8)[1], 2) + p.broadcast_u32(p.load_word(source, thread * 4), 1)
    v = p.shared_words(stage, byte)
    p.set_shared_words(stage, byte, v[1], v[0], v[3], v[2])
    p.store_words(target, byte, p.e4m3_word(x, d[0], d[1], d[2]), p.bf16_pair(x, d[3]), p.f16_pair(x, d[3]), y)
    p.store_pair(target, thread * 8, v[0], v[1])
    p.store_word(target, thread * 4, v[2])


def _kernel(body: Callable[..., None] = _uses_every_primitive, **changes: Any) -> Kernel:
    row = {"name": "test", "signature": "void(uint8[::1], uint8[::1])", "threads": 128, "registers": {"*": 64}}
    return Kernel(function=body, **{**row, "reason": "a test", **changes})


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=architecture_name)
def test_every_primitive_assembles(architecture: Architecture) -> None:
    compiled = compile_kernel(_kernel(), architecture)
    wanted = ["cp.async.cg", "ldmatrix.sync", ".trans.", "mma.sync", "ld.global.nc.v4", "st.global.v4", "ex2.approx"]
    by_hand = architecture < (8, 9)
    assert [text for text in wanted if text not in compiled.ptx] == []
    assert ("cvt.rn.f16x2.e4m3x2" in compiled.ptx) is not by_hand
    assert ("cvt.rn.satfinite.e4m3x2.f32" in compiled.ptx) is not by_hand
    assert f".target {architecture_name(architecture)}" in compiled.ptx
    assert compiled.cubin[:4] == b"\x7fELF"
    assert compiled.report.shared_bytes >= 4096
    assert violations(_kernel(), architecture, compiled.report) == []


def test_a_kernel_over_its_bounds_is_named_with_the_reason() -> None:
    def hungry(source: Any, target: Any) -> None:
        kept = cuda.local.array(256, np.float32)
        for index in range(256):
            kept[index] = source[index] * np.float32(1.5)
        for index in range(256):
            target[index] = np.uint8(kept[(index * source[0]) % 256])

    kernel = _kernel(hungry, registers={"sm_90": 4, "*": 255}, threads=1024, blocks_per_multiprocessor=2)
    report = compile_kernel(kernel, (9, 0)).report
    found = violations(kernel, (9, 0), report)
    assert any("registers; its bound is 4 (a test)" in text for text in found), found
    assert report.stack_bytes >= 1024


@pytest.mark.parametrize("kernel", CANONICAL, ids=lambda kernel: kernel.name)
def test_canonical_kernel_keeps_its_bounds_of_registers_and_spills(kernel: Kernel) -> None:
    found = list(reports([kernel], ARCHITECTURES))
    broken = [
        text for arch, report in zip(ARCHITECTURES, found, strict=True) for text in violations(kernel, arch, report)
    ]
    assert not broken, "\n".join(broken)


def test_there_are_at_most_a_dozen_canonical_kernels_and_each_has_a_reason() -> None:
    assert len(CANONICAL) <= 12
    assert [kernel.name for kernel in CANONICAL if not kernel.reason] == []
