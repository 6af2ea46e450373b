"""Every canonical kernel compiles for every architecture without a GPU, and keeps its bounds.

The full matrix is `make kernels`. Reports come from the cache folder where the sources have not changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import cuda

from kvtierd.core.geometry import Geometry
from kvtierd.gpu.cuda_interface import View
from kvtierd.gpu.kernels import binaries
from kvtierd.gpu.kernels import primitives as p
from kvtierd.gpu.kernels.arguments import cells_of
from kvtierd.gpu.kernels.attention import MERGE, choose, kernels_for
from kvtierd.gpu.kernels.attention_common import SIGNATURE
from kvtierd.gpu.kernels.compile import compile_kernel, reports, violations
from kvtierd.gpu.kernels.registry import ARCHITECTURES, Architecture, Kernel, all_kernels, architecture_name
from kvtierd.index.jit import CacheState

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
    p.store_u16(target, thread * 2, p.load_u16(source, thread * 2) + p.bits_of(p.product(x, f0) + g0))
    p.store_u8(target, thread, p.load_u8(source, thread))


def _kernel(body: Callable[..., None] = _uses_every_primitive, **changes: Any) -> Kernel:
    row = {"name": "test", "signature": "void(uint8[::1], uint8[::1])", "threads": 128, "registers": {"*": 64}}
    return Kernel(function=body, **{**row, "reason": "a test", **changes})


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=architecture_name)
def test_every_primitive_assembles(architecture: Architecture) -> None:
    compiled = compile_kernel(_kernel(), architecture)
    wanted = ["cp.async.cg", "ldmatrix.sync", ".trans.", "mma.sync", "ld.global.nc.v4", "st.global.v4", "ex2.approx"]
    wanted += ["mul.rn.f32", "ld.global.nc.u16", "ld.global.nc.u8", "st.global.u16", "st.global.u8"]
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


@pytest.mark.timeout(600)  # the largest takes 20 s for each of four architectures on a busy machine
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


def test_a_compiled_kernel_has_as_many_parameters_as_there_are_cells() -> None:
    view, number = View(4096, 3, "<f4"), 5
    compiled = compile_kernel(MERGE, (9, 0))
    found = re.findall(r"\.param \.(\w+) ", compiled.ptx.partition(")")[0])
    cells = cells_of((view, view, view, number, number, view, view, view))
    assert found == ["u64"] * cells.size
    body = next(kernel for kernel in CANONICAL if "simt_bf16" in kernel.name)
    assert body.signature == SIGNATURE
    parameters = re.findall(r"\.param \.(\w+) ", compile_kernel(body, (9, 0)).ptx.partition(")")[0])
    columns = [
        View(4096, 3, "|u1"),
        view,
        *[View(4096, 3, "<i8")] * 3,
        View(4096, 3, "<i4"),
        *[View(4096, 3, "<i8")] * 2,
    ]
    cells = cells_of((*columns, np.float32(1.5), view, view, view))
    assert parameters == ["u64"] * 56 + ["f32"] + ["u64"] * 21
    assert cells.size == len(parameters)


def test_a_kernel_is_compiled_once_and_a_torn_file_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "cache_state", lambda: CacheState(tmp_path, ""))
    made = binaries.binary_of(MERGE, (9, 0))
    assert made.cubin[:4] == b"\x7fELF"
    assert made.entry.encode() in made.cubin
    compiled = []

    def compile_again(kernel: Kernel, architecture: Architecture) -> Any:
        compiled.append(kernel.name)
        return compile_kernel(kernel, architecture)

    monkeypatch.setattr(binaries, "compile_kernel", compile_again)
    assert binaries.binary_of(MERGE, (9, 0)) == made
    assert compiled == []
    (file,) = tmp_path.iterdir()
    for torn in (b"", file.read_bytes()[:-9], file.read_bytes().replace(b"ELF", b"elf")):
        file.write_bytes(torn)
        compiled.clear()
        again = binaries.binary_of(MERGE, (9, 0))
        assert again.is_whole
        assert again.entry.encode() in again.cubin  # it has another number in every compilation
        assert compiled == [MERGE.name]
    monkeypatch.setattr(binaries, "cache_state", lambda: CacheState(None, "it is not ours"))
    compiled.clear()
    assert binaries.binary_of(MERGE, (9, 0)).is_whole
    assert compiled == [MERGE.name], "without a folder of ours nothing is kept"


def test_what_queries_over_blocks_may_need_is_known_before_they_come() -> None:
    shape = Geometry(block_size=16, layers=1, kv_heads=2, k_dim=128, v_dim=128)
    for lossy, dtypes in ((False, ["bf16"]), (True, ["bf16", "fp8_e4m3"])):
        names = {kernel.name for kernel in kernels_for(shape, lossy=lossy)}
        wanted = {choose(dtype, 128, 128, group).name for dtype in dtypes for group in range(1, 65)}
        assert names == {*wanted, MERGE.name}
    latent = Geometry(block_size=16, layers=1, kv_heads=1, k_dim=576, v_dim=0)
    assert choose("bf16", 576, 512, 16).name in {kernel.name for kernel in kernels_for(latent, lossy=False)}
    odd = Geometry(block_size=16, layers=1, kv_heads=2, k_dim=48, v_dim=48)
    assert kernels_for(odd, lossy=True) == ()
