"""The table of times on a GPU, for tests/gpu/run.sh: codec, attention and copies, each against a reference beside it.

`python -m tests.gpu.times` on a machine with a GPU, torch and a driver. It has not run on one yet.

| what | against |
|---|---|
| codec, bf16 to FP8 and back, 64 blocks of 4 MiB | a device copy of the bf16 bytes (read and written, counted once) |
| attention, 1 query, 32 heads over 8, dim 128, 64k tokens, bf16 and FP8 | the same copy, and torch's SDPA |
| Attend through the tiers, blocks in gpu, host, nvme and all three, each answer checked | a device or a pinned copy |
| the pool's copies in and out of pinned memory, 256 MiB | torch's own pinned copies |
"""

from __future__ import annotations

import mmap
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import cuda

from kvtierd.bench.rows import Row, as_table, make_row
from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import EncodedLayout
from kvtierd.gpu.attend import DTYPE_CODES, Blocks
from kvtierd.gpu.cuda_device import CudaDevice
from kvtierd.gpu.cuda_runtime import TorchRuntime
from kvtierd.gpu.kernels import codec
from kvtierd.gpu.kernels.attention import choose, run_splits
from kvtierd.gpu.kernels.attention_common import NUMBERS
from tests.gpu import attend_times

SHAPE = Geometry(block_size=128, layers=8, kv_heads=8, k_dim=128, v_dim=128)
BLOCKS, TOKENS, HEADS, ROUNDS = 64, 65_536, 32, 20
COPY_BYTES = 256 << 20


def seconds(work: Callable[[], object]) -> float:
    """Median device time of a call, by events, after three that warm up."""
    times = []
    for turn in range(ROUNDS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        if turn >= 3:
            times.append(begin.elapsed_time(end) / 1e3)
    return float(np.median(times))


def stream() -> Any:
    """torch's current stream as Numba's, so that its events time Numba's kernels."""
    return cuda.external_stream(torch.cuda.current_stream().cuda_stream)


def row(metric: str, count: int, took: float, reference: float, name: str) -> Row:
    """A rate in GB/s against another time for the same bytes."""
    return make_row("gpu", metric, count / took / 1e9, "GB/s", reference=count / reference / 1e9, reference_name=name)


def codec_rows() -> list[Row]:
    """Both directions of the codec against a device copy."""
    count = BLOCKS * SHAPE.slot_bytes
    exact = torch.randn(count // 2, device="cuda").to(torch.bfloat16).view(torch.uint8)
    back, small_bytes = torch.empty_like(exact), EncodedLayout(SHAPE).slot_bytes
    small = torch.empty(BLOCKS * small_bytes, dtype=torch.uint8, device="cuda")
    at, small_at = (cuda.to_device(np.arange(BLOCKS) * size) for size in (SHAPE.slot_bytes, small_bytes))
    arrays = [cuda.as_cuda_array(tensor) for tensor in (exact, back, small)]
    copy = seconds(lambda: back.copy_(exact))
    encode = seconds(lambda: codec.launch(codec.ENCODERS, SHAPE, arrays[0], at, arrays[2], small_at, stream=stream()))
    decode = seconds(lambda: codec.launch(codec.DECODERS, SHAPE, arrays[1], at, arrays[2], small_at, stream=stream()))
    name = "a device copy of the bf16 bytes"
    return [
        row("encode bf16 to FP8", count, encode, copy, name),
        row("decode FP8 to bf16", count, decode, copy, name),
    ]


def attention_rows() -> list[Row]:
    """Attention over blocks of one layer against a device copy, and torch's SDPA on contiguous KV."""
    shape = Geometry(block_size=128, layers=1, kv_heads=8, k_dim=128, v_dim=128)
    blocks, layout = TOKENS // shape.block_size, EncodedLayout(shape)
    exact = torch.randn(blocks * shape.slot_bytes // 2, device="cuda").to(torch.bfloat16).view(torch.uint8)
    small = torch.empty(blocks * layout.slot_bytes, dtype=torch.uint8, device="cuda")
    places = [np.arange(blocks) * size for size in (shape.slot_bytes, layout.slot_bytes)]
    device_places = [cuda.to_device(place) for place in places]
    arrays = [cuda.as_cuda_array(tensor) for tensor in (exact, small)]
    codec.launch(codec.ENCODERS, shape, arrays[0], device_places[0], arrays[1], device_places[1], stream=stream())
    numbers, vector = np.zeros(NUMBERS, np.int64), shape.kv_heads * shape.k_dim
    part = shape.block_size * vector
    numbers[:11] = shape.kv_heads, HEADS // shape.kv_heads, 1, TOKENS - 1, 0, vector, 128, vector, 128, part, 8
    q = torch.randn(HEADS * shape.k_dim, device="cuda")
    kv_bytes, positions = blocks * shape.layer_bytes, np.arange(blocks) * shape.block_size
    target = torch.empty_like(exact)
    copy = seconds(lambda: target.copy_(exact))
    kv = [torch.randn(1, 8, TOKENS, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    query = q.to(torch.bfloat16).reshape(1, HEADS, 1, 128)
    sdpa = seconds(lambda: torch.nn.functional.scaled_dot_product_attention(query, *kv, enable_gqa=True))
    found = []
    for index, dtype in enumerate(("bf16", "fp8_e4m3")):
        base = (exact, small)[index].data_ptr()
        scales = base + places[1] + layout.scales_offset if index else 0
        described = Blocks.make(
            base + places[index], tokens=128, positions=positions, dtypes=DTYPE_CODES[dtype], scales=scales
        )
        variant = choose(dtype, 128, 128, HEADS // shape.kv_heads)

        def work(variant: Any = variant, array: Any = arrays[index], base: int = base, some: Any = described) -> None:
            given = (variant, array, base, cuda.as_cuda_array(q), some, numbers, 0.0, 2)
            run_splits(*given, place=cuda.to_device, stream=stream())

        took = seconds(work)
        what = f"attention over {dtype} blocks"
        copied = copy / (1 << index)
        found.append(row(f"{what}, described anew", kv_bytes >> index, took, copied, "a device copy of as many bytes"))
        found.append(row(what, kv_bytes, took, sdpa, "torch's SDPA, bf16, contiguous"))
    return found


def copy_rows() -> list[Row]:
    """The pool's own copies against torch's pinned ones."""
    device = CudaDevice(torch.cuda.current_device(), COPY_BYTES, TorchRuntime("cuda:0"))
    memory = np.frombuffer(mmap.mmap(-1, COPY_BYTES), np.uint8)
    pinned = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    try:
        if not device.register_host(memory):
            sys.stderr.write("host memory could not be pinned: the copies below are unpinned\n")
        inwards = seconds(lambda: device.copy_in(0, memory))
        outwards = seconds(lambda: device.copy_out(0, memory))
    finally:
        device.unregister_host(memory)
        device.close()
    plain_in, plain_out = seconds(lambda: there.copy_(pinned)), seconds(lambda: pinned.copy_(there))
    name = "torch's copy of pinned memory"
    return [
        row("H2D into the pool", COPY_BYTES, inwards, plain_in, name),
        row("D2H from the pool", COPY_BYTES, outwards, plain_out, name),
    ]


def attend_rows() -> list[Row]:
    """Whole calls of Attend; a wrong answer is an AssertionError."""
    blocks = 256
    count = blocks * attend_times.SHAPE.layer_bytes
    there, other = (torch.empty(count, dtype=torch.uint8, device="cuda") for _ in range(2))
    pinned = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    on_device, over_bus = seconds(lambda: other.copy_(there)), seconds(lambda: there.copy_(pinned))
    found = []
    for place, took in attend_times.attend_seconds("cuda:0", blocks).items():
        reference = on_device if place == "gpu" else over_bus
        name = "a device copy of as many bytes" if place == "gpu" else "a pinned copy of as many bytes"
        found.append(row(f"Attend, blocks in {place}", count, took, reference, name))
    return found


def main() -> int:
    """Print each part's table as soon as it is there; one that fails does not take the others with it."""
    failed = 0
    for part in (codec_rows, attention_rows, copy_rows, attend_rows):
        try:
            text = as_table(part())
        except Exception:  # noqa: BLE001 - whatever it was, the other tables are wanted
            failed += 1
            text = f"{part.__name__} failed:\n{traceback.format_exc()}"
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
