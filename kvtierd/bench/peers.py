"""`kvtierctl bench peers`: the same stores and loads by us and by other systems on this machine, where installed.

Peers live in environments of their own beside the checkout (`make bench-peers` makes them) and are run in rounds that
alternate with ours. LMCache's server in CPU mode moves requests of 128 MiB (4,096 tokens) between its shared memory and
its client, with files behind; ours the same through our client, with the nvme tier behind, at the same pace. Its time
is that of the transfer, and bytes are compared afterwards; so are ours in the rows beside it, but that our store hashes
what it copies, which is how blocks become visible. What a retrieve costs that hashes too is told apart. Both copy once:
their server between its memory and its client's, which it has mapped; our client between its memory and the arena, by
the compiled copies (`Client(copies=copy_streaming)`). Rows that say "copies of NumPy" are of the client as it comes.

Mooncake Store moves objects of 2 MiB over TCP on this host, unverified in its time; ours are verified within it.
LMCache's adapters of files load objects of 2 MiB from the page cache; ours come once from host and once from nvme, past
the page cache. vLLM answers prompts that come again, by its ExampleConnector and by ours (not with `quick`: an engine
takes half a minute to start). The naive baseline copies whole contexts between private memory, and hashes nothing.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvtierd.bench.copies import Threads, private_memory
from kvtierd.bench.naive_kv import ContiguousKv, token_bytes
from kvtierd.bench.options import Options, need_memory, thread_count
from kvtierd.bench.peer_environments import interpreter
from kvtierd.bench.peer_lmcache import (
    CHUNK_TOKENS,
    LAYERS,
    PAUSE_S,
    REQUEST_TOKENS,
    REQUESTS,
    lmcache_server,
    load_rate,
    median,
)
from kvtierd.bench.peer_mooncake import mooncake
from kvtierd.bench.peer_vllm import PROMPT_TOKENS, example_connector, first_token_s, our_connector
from kvtierd.bench.rounds import alternate, timed
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.bench.workload import BLOCK_BYTES, LARGE, connected, daemon_and_client, expect, namespace, random_keys
from kvtierd.core.checksum import Bytes
from kvtierd.core.geometry import Geometry
from kvtierd.core.units import GIB, MIB
from kvtierd.index.streaming import copy_streaming
from kvtierd.protocol.client import Client
from kvtierd.protocol.copying import default_threads

REQUEST = Geometry(block_size=CHUNK_TOKENS, layers=LAYERS, kv_heads=8, k_dim=128, v_dim=128)
REQUEST_BLOCKS = REQUEST_TOKENS // CHUNK_TOKENS
REQUEST_BYTES = REQUEST_BLOCKS * REQUEST.block_bytes
OBJECTS = 64
LOOKUPS = 200
PROMPTS = 3
FASTER = ">= 5"

assert REQUEST_BYTES == 128 * MIB


class Ours:
    """Stores under fresh keys, made from `seed` on, and loads again: `count` blocks of a shape at a time."""

    def __init__(self, client: Client, shape: Geometry, count: int, seed: int) -> None:
        self._client, self._count = client, count
        self._handle = client.register(namespace(shape))
        self._source: Bytes = private_memory(count * shape.block_bytes, seed=1).reshape(count, shape.block_bytes)
        self._out: Bytes = private_memory(count * shape.block_bytes, seed=2).reshape(count, shape.block_bytes)
        self._turn = seed
        self.bytes = count * shape.block_bytes
        self.store()

    def store(self) -> float:
        """Seconds to store all blocks under keys that nobody has stored."""
        self._turn += 1
        self._keys = random_keys(self._count, seed=self._turn)
        begin = time.perf_counter()
        stored = self._client.store(self._handle, self._keys, self._source).stored
        seconds = time.perf_counter() - begin
        expect("stored", stored, self._count)
        return seconds

    def load(self, *, verify: bool = True) -> float:
        """Seconds to load them. With `verify` the client hashes every byte within that time; all are compared after."""
        self._out[:] = 0
        begin = time.perf_counter()
        found = self._client.fetch(self._handle, self._keys, self._out, verify=verify).count
        seconds = time.perf_counter() - begin
        expect("loaded", found, self._count)
        if not np.array_equal(self._out, self._source):
            raise BenchError("other bytes came back")
        return seconds

    def load_from_nvme(self) -> float:
        """The same after host has let go of them."""
        self._client.flush()
        self._client.purge(self._handle, tiers=["host"])
        return self.load()

    def lookup(self) -> float:
        """Seconds of one lookup, of many."""
        begin = time.perf_counter()
        for _ in range(LOOKUPS):
            found = self._client.lookup(self._handle, self._keys).count
        seconds = (time.perf_counter() - begin) / LOOKUPS
        expect("looked up", found, self._count)
        return seconds


class Naive:
    """The baseline in the same form: a request saved by one copy of its whole context, and loaded by another."""

    def __init__(self, shape: Geometry, tokens: int, threads: Threads) -> None:
        self._threads, self.bytes = threads, tokens * token_bytes(shape)
        kv = ContiguousKv(shape, tokens)
        kv.append(private_memory(self.bytes, seed=3).reshape(kv.memory.shape))
        self._live, self._saved = kv.memory.reshape(-1), private_memory(self.bytes, seed=4)
        self._pieces = [slice(at, at + MIB) for at in range(0, self.bytes, MIB)]

    def store(self) -> float:
        """Seconds to save the context."""
        return timed(lambda: self._copy(self._live, self._saved))

    def load(self) -> float:
        """Seconds to load it."""
        seconds = timed(lambda: self._copy(self._saved, self._live))
        if not np.array_equal(self._saved, self._live):
            raise BenchError("the baseline brought other bytes back")
        return seconds

    def _copy(self, source: Bytes, target: Bytes) -> None:
        self._threads.copy([source[piece] for piece in self._pieces], [target[piece] for piece in self._pieces])


def rows(options: Options) -> Iterator[Row]:
    """Measure against each peer that is installed, and the baseline. BenchError where no peer is."""
    peers = {name: interpreter(name) for name in ("lmcache", "mooncake", "vllm")}
    if not any(peers.values()):
        raise BenchError("no peer is installed in an environment here: run `make bench-peers`")
    need_memory(5 * GIB)
    with tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=options.directory) as name:
        folder = Path(name)
        with _ours(folder / "large", REQUEST, REQUEST_BLOCKS) as (ours, plain):
            yield from _naive_rows(ours, options.rounds(7, 3))
            if (python := peers["lmcache"]) is not None:
                yield from _server_rows(python, folder, ours, plain, options.rounds(4, 2))
        with _ours(folder / "small", LARGE, OBJECTS) as (ours, _):
            if (python := peers["mooncake"]) is not None:
                yield from _mooncake_rows(python, ours, options.rounds(7, 3))
            if (python := peers["lmcache"]) is not None:
                yield from _adapter_rows(python, folder, ours, options.rounds(5, 3))
        if (python := peers["vllm"]) is not None and not options.quick:
            yield from _vllm_rows(python, folder)


@contextlib.contextmanager
def _ours(folder: Path, shape: Geometry, count: int) -> Iterator[tuple[Ours, Ours]]:
    """With compiled copies, and with those of NumPy."""
    settings = {"gpu__capacity": 0, "host__capacity": 2 * GIB, "nvme__capacity": 16 * GIB}
    threads = default_threads()
    with (
        daemon_and_client(folder, threads, **settings) as (daemon, plain),
        connected(daemon, threads, copy_streaming) as client,
    ):
        yield Ours(client, shape, count, seed=1), Ours(plain, shape, count, seed=1 << 20)


def _naive_rows(ours: Ours, rounds: int) -> Iterator[Row]:
    threads = Threads(thread_count())
    try:
        naive = Naive(REQUEST, REQUEST_TOKENS, threads)
        store, theirs, load, back = alternate([ours.store, naive.store, ours.load, naive.load], rounds)
    finally:
        threads.close()
    for what, mine, other in (("store", store, theirs), ("load", load, back)):
        yield _rate(f"{what} of 128 MiB", ours.bytes, mine, other, "a plain copy of the whole context, not hashed", "")


def _server_rows(python: Path, folder: Path, ours: Ours, plain: Ours, rounds: int) -> Iterator[Row]:
    seen: list[dict[str, float]] = []
    mine: list[dict[str, float]] = []
    numpy: list[dict[str, float]] = []
    with lmcache_server(python, folder, memory_gib=2) as server:
        for _ in range(rounds):
            mine += [_request(ours) for _ in range(REQUESTS)]
            numpy += [_request(plain) for _ in range(REQUESTS)]
            seen.append(server.round())
    name = "LMCache's server, CPU mode"
    yield make_row(
        "peers",
        f"lookup of {REQUEST_TOKENS:,} tokens",
        median(mine, "lookup") * 1e3,
        "ms",
        reference=median(seen, "lookup") * 1e3,
        reference_name=name,
        goal="<= 0.05",
    )
    for what in ("store", "retrieve"):
        other = median(seen, what)
        if not math.isnan(other):
            yield _rate(f"{what} of 128 MiB", REQUEST_BYTES, median(mine, what), other, name, FASTER)
            yield _rate(f"{what} of 128 MiB, copies of NumPy", REQUEST_BYTES, median(numpy, what), other, name, "")
            if what == "retrieve":
                hashed = median(mine, "hashed")
                yield _rate("retrieve of 128 MiB, hashed as it is copied", REQUEST_BYTES, hashed, other, name, "")
    found = server.retrieved / server.asked
    yield make_row("peers", "requests that LMCache's server had when asked again", found, "")


def _request(ours: Ours) -> dict[str, float]:
    """Seconds of each step of a request, in the order and after the pause of LMCache's bench."""
    time.sleep(PAUSE_S)
    return {
        "store": ours.store(),
        "lookup": ours.lookup(),
        "retrieve": ours.load(verify=False),
        "hashed": ours.load(),
    }


def _mooncake_rows(python: Path, ours: Ours, rounds: int) -> Iterator[Row]:
    with mooncake(python, OBJECTS, BLOCK_BYTES) as peer:
        figures = alternate(
            [
                ours.store,
                lambda: peer.seconds("store"),
                ours.load,
                lambda: peer.seconds("load"),
                ours.lookup,
                lambda: peer.seconds("lookup"),
            ],
            rounds,
        )
    store, put, load, get, lookup, exist = figures
    name = "Mooncake Store, TCP on this host, unverified"
    yield _rate(f"store of {OBJECTS} objects of 2 MiB", ours.bytes, store, put, name, "")
    yield _rate(f"load of {OBJECTS} objects of 2 MiB", ours.bytes, load, get, name, "")
    yield make_row("peers", f"lookup of {OBJECTS} keys", lookup * 1e3, "ms", reference=exist * 1e3, reference_name=name)


def _adapter_rows(python: Path, folder: Path, ours: Ours, rounds: int) -> Iterator[Row]:
    rates = {kind: load_rate(python, folder, kind, OBJECTS, BLOCK_BYTES) for kind in ("fs", "fs_native")}
    host, nvme = alternate([ours.load, ours.load_from_nvme], rounds)
    for tier, seconds in (("host", host), ("nvme, past the page cache", nvme)):
        for kind, rate in rates.items():
            name = f"LMCache's {kind} adapter, from the page cache"
            yield _rate(
                f"load of {OBJECTS} objects of 2 MiB from {tier}", ours.bytes, seconds, ours.bytes / rate, name, ""
            )


def _vllm_rows(python: Path, folder: Path) -> Iterator[Row]:
    settings = {"gpu__capacity": 0, "host__capacity": GIB, "nvme__capacity": 2 * GIB}
    with daemon_and_client(folder / "vllm", default_threads(), **settings) as (daemon, _):
        ours_cold, ours = first_token_s(python, folder / "ours.log", our_connector(daemon.endpoint), PROMPTS)
    files = example_connector(folder / "files")
    cold, theirs = first_token_s(python, folder / "files.log", files, PROMPTS)
    for what, mine, other in (("comes again", ours, theirs), ("is new", ours_cold, cold)):
        yield make_row(
            "peers",
            f"vLLM on CPUs: first token of a prompt of {PROMPT_TOKENS:,} tokens that {what}",
            mine * 1e3,
            "ms",
            reference=other * 1e3,
            reference_name="vLLM's ExampleConnector (files)",
        )


def _rate(metric: str, size: int, seconds: float, other_seconds: float, name: str, goal: str) -> Row:
    return make_row(
        "peers",
        metric,
        size / seconds / 1e9,
        "GB/s",
        reference=size / other_seconds / 1e9,
        reference_name=name,
        goal=goal,
    )
