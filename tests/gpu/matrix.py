"""Every kernel of attention on a GPU, through the device as the daemon uses it, against the oracle (tests/gpu/run.sh).

`python -m tests.gpu.matrix [--seed N] [--sample N]` compiles what the cache lacks, a process a processor, and then
computes dtypes x dims x query heads a KV head x layouts on random inputs of that seed (a new one each time), which it
prints. Blocks lie in the pool, in pinned and in ordinary memory; device memory is full of NaN before it is used, and
so is every byte of a block that does not count. Exit code 1 where an answer is wrong. With `--sample` it takes so many
cases, and in Numba's simulator (NUMBA_ENABLE_CUDASIM=1) tiny ones. It has not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import itertools
import os
import secrets
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kvtierd.core.geometry import Geometry
from kvtierd.gpu.cuda_device import CudaDevice
from kvtierd.gpu.cuda_interface import Allocation
from kvtierd.gpu.cuda_runtime import TorchRuntime
from kvtierd.gpu.kernels.attention import ALL, DIMS, LATENT, MERGE
from kvtierd.gpu.kernels.compile_apart import Apart
from kvtierd.gpu.kernels.registry import cuda_is_simulated
from tests.gpu.simulated.sim_attend import compare
from tests.gpu.simulated_cuda import make_device

CAPACITY = 8 << 20
PLACES = ("gpu", "host", "other", "gpu")
DTYPES = (("bf16",), ("fp16",), ("fp32",), ("fp8_e4m3",), ("bf16", "coded"))
GROUPS = (1, 2, 3, 4, 8, 16)


class PoisonedRuntime(TorchRuntime):
    """Device memory begins as NaN."""

    def allocate(self, gpu: int, count: int) -> Allocation:
        """As it is made, then filled."""
        made = super().allocate(gpu, count)
        made.owner.fill_(0xFF)
        self._torch.cuda.synchronize(gpu)  # other streams do not wait for this one
        return made


def fill_cache() -> float:
    """Compile all kernels for GPU 0, several at a time; seconds it took. SystemExit where one cannot be compiled."""
    import torch

    begin_s = time.monotonic()
    major, minor = torch.cuda.get_device_capability(0)
    count = max(1, len(os.sched_getaffinity(0)) - 1)
    kernels = (MERGE, *ALL)
    with ThreadPoolExecutor(count) as pool:
        shares = [pool.submit(Apart().fill, kernels[i::count], (major, minor)) for i in range(count)]
        if problems := {problem for share in shares if (problem := share.result())}:
            raise SystemExit("; ".join(sorted(problems)))
    return time.monotonic() - begin_s


def say(text: str) -> None:
    """A line, at once: whoever runs this may end it."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def cases() -> Iterator[tuple[Any, ...]]:
    """Dtypes, dims, group and layout of each."""
    yield from itertools.product(DTYPES, (*DIMS, LATENT), GROUPS, ("nhd", "hnd"))


def run_case(device: CudaDevice, rng: np.random.Generator, case: tuple[Any, ...]) -> None:
    """Compute one; AssertionError where it is wrong."""
    dtypes, dims, group, layout = case
    latent = dims == LATENT
    block_size, most = (4, 13) if cuda_is_simulated() else (32, 300)
    heads = 1 if latent or cuda_is_simulated() else 2
    geometry = Geometry(
        block_size=block_size, layers=1, kv_heads=heads, k_dim=dims[0], v_dim=0 if latent else dims[1],
        layout=layout, dtype=dtypes[0],
    )  # fmt: skip
    # Lengths around the edges of blocks, and queries of a decode step and of a few tokens.
    length = max(2, int(rng.integers(1, most // block_size + 1)) * block_size + int(rng.integers(-1, 2)))
    options = {"v_dim": dims[1]} if latent else {}
    attention = compare(
        device, geometry, length, heads * group, PLACES,
        dtypes=dtypes, queries=int(rng.integers(1, 3)), rng=rng, capacity=CAPACITY, **options,
    )  # fmt: skip
    attention.close()


def main() -> int:
    """Run, and say what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--sample", type=int, help="so many cases, drawn at random")
    options = parser.parse_args()
    rng, chosen = np.random.default_rng(options.seed), list(cases())
    if options.sample is not None:
        chosen = [chosen[i] for i in rng.permutation(len(chosen))[: options.sample]]
    simulated = cuda_is_simulated()
    say(f"seed {options.seed}, {len(chosen)} cases")
    if not simulated:
        say(f"kernels compiled or found in {fill_cache():.0f} s")
    device = make_device(CAPACITY) if simulated else CudaDevice(0, CAPACITY, PoisonedRuntime("cuda:0"))
    wrong = 0
    begin_s = time.monotonic()
    for case in chosen:
        try:
            run_case(device, rng, case)
        except Exception as error:  # noqa: BLE001 - one that is wrong must not hide the others
            wrong += 1
            say(f"WRONG: {case}: {type(error).__name__}: {error}")
    device.close()
    say(f"{len(chosen) - wrong} of {len(chosen)} cases right in {time.monotonic() - begin_s:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
