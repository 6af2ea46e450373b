"""`kvtierctl bench trace --live`: the trace through a daemon and the client library, with real bytes.

Each request does what an engine does: look up, fetch what is there, store the prefix. Blocks are of one page; their
bytes are made from their keys and compared when they come back. Requests follow each other without the pauses of the
trace, so what the daemon learns is the order and the proportions of the pauses, squeezed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvtierd.bench.options import Options
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.bench.trace_file import Trace
from kvtierd.bench.trace_queues import lru_hits
from kvtierd.bench.workload import SMALL, TIMEOUT_S, await_memory, daemon_and_client, namespace
from kvtierd.core.checksum import Bytes
from kvtierd.core.keys import KEY_BYTES, Keys
from kvtierd.core.units import MIB
from kvtierd.protocol.client import Client

HOST_BLOCKS = 10_240
"""Of a daemon of our own; as near to 10,000 as chunks of 1 MiB come."""
QUICK_REQUESTS = 1_500


@dataclasses.dataclass(slots=True)
class LiveOutcome:
    """What a replay of `requests` requests saw: blocks asked for, found, and not stored for want of room."""

    requests: int = 0
    accesses: int = 0
    hits: int = 0
    dropped: int = 0
    seconds: float = 0.0


def replay_live(client: Client, trace: Trace, requests: int) -> LiveOutcome:
    """Replay the first requests. Raises BenchError when a block comes back with other bytes than were stored."""
    handle = client.register(namespace(SMALL))
    # Other keys each time: a daemon that runs on may have the blocks of the replay before.
    keys = np.random.default_rng(secrets.randbits(64)).integers(0, 256, (trace.unique, KEY_BYTES), np.uint8)
    outcome = LiveOutcome(requests, int(trace.starts[requests]))
    begin_s = time.perf_counter()
    for begin, end in zip(trace.starts[:requests].tolist(), trace.starts[1 : requests + 1].tolist(), strict=True):
        asked = keys[trace.blocks[begin:end]]
        if hit := client.lookup(handle, asked).count:
            fetched = client.fetch(handle, asked[:hit])
            _check(fetched.blocks, asked)
            outcome.hits += len(fetched.blocks)
        outcome.dropped += client.store(handle, asked, _bytes_of(asked)).dropped
    outcome.seconds = time.perf_counter() - begin_s
    return outcome


def _bytes_of(keys: Keys) -> Bytes:
    """Packed blocks, [n, block_bytes]: their keys over and over."""
    return np.tile(keys, (1, SMALL.block_bytes // KEY_BYTES))


def _check(blocks: Bytes, keys: Keys) -> None:
    wrong = (blocks != _bytes_of(keys[: len(blocks)])).any(axis=1)
    if wrong.any():
        raise BenchError(f"block {int(wrong.argmax())} of {len(blocks)} came back with other bytes than were stored")


@contextlib.contextmanager
def _client(options: Options) -> Iterator[Client]:
    if options.endpoint:
        with Client(options.endpoint, timeout_s=TIMEOUT_S, transfer_timeout_s=TIMEOUT_S) as client:
            await_memory(client)
            yield client
        return
    with (
        tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=options.directory) as folder,
        daemon_and_client(
            Path(folder), 1, gpu__capacity=0, nvme__directory="", host__capacity=HOST_BLOCKS * SMALL.slot_bytes,
            host__chunk_bytes=MIB, host__watermark=1.0,
        ) as (_, client),
    ):  # fmt: skip
        yield client


def live_rows(options: Options, trace: Trace) -> Iterator[Row]:
    """Hits and requests a second, against what LRU of the same size hits."""
    requests = min(trace.requests, options.rounds(trace.requests, QUICK_REQUESTS))
    with _client(options) as client:
        blocks = client.stats()["host_capacity_bytes"] // SMALL.slot_bytes
        outcome = replay_live(client, trace, requests)
    name = f"{trace.name}, live"
    accesses = outcome.accesses
    lru = lru_hits(trace.blocks[:accesses], trace.starts[: requests + 1], trace.unique, blocks) / accesses
    yield make_row(
        "trace", f"{name}: prefix-hit ratio, {blocks:,} blocks in host", outcome.hits / accesses, "",
        reference=lru or None, reference_name="LRU in the simulator",
    )  # fmt: skip
    yield make_row("trace", f"{name}: requests", requests / outcome.seconds, "/s")
    yield make_row("trace", f"{name}: block accesses", accesses / outcome.seconds, "/s")
    yield make_row("trace", f"{name}: blocks not stored for want of room", outcome.dropped / accesses, "")
