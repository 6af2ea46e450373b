"""`kvtierctl bench sweep`: block sizes 64 to 512, windows 0 to 5, under the four profiles, each with its kind of load.

A profile is a claim: for this kind of load these settings are better than the default ones. Each kind of load is run at
every block size and window, with the profile's other settings, in daemons of its own; the figure is tokens a second.

* ultra-long: one long context comes cold from nvme, block by block in order, nothing between.
* high-concurrency: many prompts of 300 to 1,500 tokens behind a shared prefix are stored and read back from host; what
  is shared counts once, what does not fill a block cannot be kept.
* bandwidth-limited: as ultra-long, in a namespace that allows FP8, so that what cools down moves in half of the bytes.
* compute-rich: as ultra-long, with work after each block for as long as a cold read of it takes.

A row for each pair is a figure to know; the profile's own pair stands beside the default settings under the same load.
The windows of these two come first, and no other is begun after a profile has taken PROFILE_S (QUICK_S with `quick`):
how many of the pairs that were asked for it got to is told.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvtierd.bench.copies import private_memory
from kvtierd.bench.options import Options, need_memory
from kvtierd.bench.rounds import alternate
from kvtierd.bench.rows import Row, make_row
from kvtierd.bench.workload import daemon_and_client, expect, namespace
from kvtierd.core.geometry import Geometry
from kvtierd.core.keys import Keys, block_keys
from kvtierd.core.units import GIB, MIB
from kvtierd.protocol.client import Client
from kvtierd.protocol.copying import default_threads

BLOCK_SIZES, WINDOWS = (64, 128, 256, 512), (0, 1, 3, 5)
DEFAULT = (128, 3)
LONG_TOKENS = 16_384
SHARED_TOKENS, PROMPTS = 256, 64
PROFILE_S, QUICK_S = 90.0, 20.0
"""Seconds after which a profile begins no further window: all four end within some six minutes, or one and a half."""
Figure = Callable[[], float]
"""Tokens a second of one pass."""


def shape_of(block_size: int) -> Geometry:
    """4 KiB a token: 2 layers of 8 KV heads of 64."""
    return Geometry(block_size=block_size, layers=2, kv_heads=8, k_dim=64, v_dim=64)


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """What a profile sets, and what runs under it: `load` makes a figure of a client and a block size."""

    block_size: int
    window: int
    load: Callable[[Client, int], Figure]
    settings: dict[str, object] = dataclasses.field(default_factory=dict)


def cold_read(client: Client, block_size: int, *, works: bool = False, lossy: bool = False) -> Figure:
    """One long context, stored once; each pass reads it from nvme in order."""
    shape = shape_of(block_size)
    handle = client.register(namespace(shape), allow_loss=lossy)
    keys = block_keys(handle.digest, range(LONG_TOKENS), block_size)
    # bf16 numbers of ordinary size: FP8 must have something to encode.
    numbers = np.random.default_rng(1).standard_normal(LONG_TOKENS * shape.block_bytes // block_size // 2, np.float32)
    blocks = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(len(keys), shape.block_bytes)
    client.purge(handle)  # another profile's prompts may begin alike
    expect("stored", client.store(handle, keys, blocks).stored, len(keys))
    client.flush()
    out = private_memory(shape.block_bytes, seed=2).reshape(1, -1)

    def one_pass(work_s: float) -> float:
        client.purge(handle, tiers=["host", "gpu"])
        begin = time.perf_counter()
        for number in range(len(keys)):
            with client.acquire(handle, keys[number : number + 1]) as lease:
                expect("read", lease.copy_to(out), 1)
            _work(work_s)
        return time.perf_counter() - begin

    work_s = one_pass(0.0) / len(keys) if works else 0.0
    return lambda: LONG_TOKENS / one_pass(work_s)


def many_prompts(client: Client, block_size: int) -> Figure:
    """Prompts that share a prefix: a pass forgets, stores and reads them; only tokens in whole blocks count."""
    shape = shape_of(block_size)
    handle = client.register(namespace(shape))
    rng = np.random.default_rng(3)
    prompts: list[Keys] = []
    for number, length in enumerate(rng.integers(300, 1500, PROMPTS).tolist()):
        tail = np.arange(length) + (number + 1) * 1_000_000
        tokens = np.concatenate([np.arange(SHARED_TOKENS), tail])
        prompts.append(block_keys(handle.digest, tokens[: tokens.size // block_size * block_size], block_size))
    longest = max(map(len, prompts))
    source = private_memory(longest * shape.block_bytes, seed=4).reshape(longest, shape.block_bytes)
    out = np.empty_like(source)

    def one_pass() -> float:
        client.purge(handle)
        begin, served = time.perf_counter(), 0
        for keys in prompts:
            client.store(handle, keys, source[: len(keys)])
            found = client.fetch(handle, keys, out).count
            expect("fetched", found, len(keys))
            served += found * block_size
        return served / (time.perf_counter() - begin)

    return one_pass


PROFILES: dict[str, Profile] = {
    "ultra-long": Profile(512, 3, cold_read),
    "high-concurrency": Profile(64, 3, many_prompts),
    "bandwidth-limited": Profile(
        128,
        3,
        lambda client, block_size: cold_read(client, block_size, lossy=True),
        {"kv_cache_config__compression__enabled": True, "kv_cache_config__compression__threshold": 100},
    ),
    "compute-rich": Profile(128, 5, lambda client, block_size: cold_read(client, block_size, works=True)),
}


def rows(options: Options) -> Iterator[Row]:
    """Sweep each profile, or those asked for; `quick` takes the ends of both ranges, the default pair and its own."""
    need_memory(2 * GIB)
    for name, profile in PROFILES.items():
        if not options.wants(name):
            continue
        pairs = _pairs(profile, options)
        figures = _swept(profile, pairs, options)
        yield from _rows(name, profile, figures)
        swept = len(figures.keys() & pairs)
        yield make_row("sweep", f"{name}: of {len(pairs)} pairs measured", swept, "")


def _pairs(profile: Profile, options: Options) -> list[tuple[int, int]]:
    if options.quick:
        return sorted({(64, 0), (512, 5), DEFAULT, (profile.block_size, profile.window)})
    return [(size, window) for size in BLOCK_SIZES for window in WINDOWS]


def _swept(profile: Profile, pairs: list[tuple[int, int]], options: Options) -> dict[tuple[int, int], float]:
    """Figures by pair, as far as the time goes."""
    figures: dict[tuple[int, int], float] = {}
    end_s = time.monotonic() + (QUICK_S if options.quick else PROFILE_S)
    first = (profile.window, DEFAULT[1])
    for window in sorted({window for _, window in pairs}, key=lambda each: (each not in first, each)):
        if window not in first and time.monotonic() > end_s:
            break
        sizes = [size for size, each in pairs if each == window]
        with _daemon(options, kv_cache_config__prefetch_window=window, **profile.settings) as client:
            loads = [profile.load(client, size) for size in sizes]
            figures |= {
                (size, window): figure
                for size, figure in zip(sizes, alternate(loads, options.rounds(3, 1)), strict=True)
            }
    # A lossy profile is about bytes: the default settings beside it are those without FP8, under the same load.
    if profile.settings:
        with _daemon(options, kv_cache_config__prefetch_window=DEFAULT[1]) as client:
            plain = alternate([cold_read_of(client)], options.rounds(3, 1))
        figures[DEFAULT_SETTINGS] = plain[0]
    return figures


DEFAULT_SETTINGS = (0, 0)
"""Where the figure of the default settings stands, if the profile differs from them in more than the pair."""


def cold_read_of(client: Client) -> Figure:
    """The load of a profile under default settings, exact."""
    return cold_read(client, DEFAULT[0])


@contextlib.contextmanager
def _daemon(options: Options, **settings: Any) -> Iterator[Client]:
    fixed = {"gpu__capacity": 0, "host__capacity": 512 * MIB, "nvme__capacity": 4 * GIB, "nvme__scrub_rate": 0}
    with (
        tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=options.directory) as folder,
        daemon_and_client(Path(folder), default_threads(), **fixed, **settings) as (_, client),
    ):
        yield client


def _rows(name: str, profile: Profile, figures: dict[tuple[int, int], float]) -> Iterator[Row]:
    default = figures.pop(DEFAULT_SETTINGS, figures[DEFAULT])
    for (size, window), figure in sorted(figures.items()):
        yield make_row("sweep", f"{name}: blocks of {size}, window {window}", figure / 1e3, "k tokens/s")
    best = max(figures, key=lambda pair: figures[pair])
    yield make_row(
        "sweep",
        f"{name}: its own settings",
        figures[profile.block_size, profile.window] / 1e3,
        "k tokens/s",
        reference=default / 1e3,
        reference_name=f"the default settings; claimed is more than 1; best were blocks of {best[0]}, window {best[1]}",
        goal="> 1",
    )


def _work(seconds: float) -> None:
    """Keep this thread busy, as computing on a block would."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass
