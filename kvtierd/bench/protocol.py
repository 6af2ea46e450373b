"""`kvtierctl bench protocol`: lookups of 32 keys against a bare pyzmq asyncio ROUTER that echoes frames of that size.

What is compared: the same synchronous process is the client of both. For the daemon it calls `Client.lookup_many`,
which encodes each request, keeps at most `MAX_UNANSWERED` in flight, decodes and pairs the replies; every lookup finds
its 32 blocks. For the echo it does the same sends and receives on a DEALER socket of the same kind, with as many in
flight at most and frames encoded beforehand: a header as long as a real lookup's and 1,024 bytes of keys there, one
frame as long as a real reply back. Both servers are processes of their own; the echo parses nothing and looks nothing
up. So the ratio is what identity, checks and the page table cost on top of sockets and loop.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvtierd.bench.echo import echo_process
from kvtierd.bench.echo_client import EchoClient
from kvtierd.bench.options import Options
from kvtierd.bench.rounds import alternate, timed
from kvtierd.bench.rows import Row, make_row
from kvtierd.bench.workload import BATCH, SMALL, daemon_and_client, expect, namespace, random_keys
from kvtierd.core.keys import KEY_BYTES, Keys
from kvtierd.core.units import MIB
from kvtierd.protocol.client import MAX_UNANSWERED, Client
from kvtierd.protocol.codec import encode
from kvtierd.protocol.messages import Lookup, LookupReply
from kvtierd.protocol.results import NamespaceHandle

SEQUENCES = 64
LOOKUPS = 8 * MAX_UNANSWERED
ROUND_TRIPS = 1000
_ECHO = "bare pyzmq asyncio ROUTER echo"


class LookupLoad:
    """Sequences of 32 stored blocks, looked up again and again."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._handle: NamespaceHandle = client.register(namespace(SMALL))
        self._sequences: list[Keys] = [random_keys(BATCH, seed) for seed in range(SEQUENCES)]
        blocks = np.random.default_rng(0).integers(0, 256, (BATCH, SMALL.block_bytes), np.uint8)
        for keys in self._sequences:
            expect("stored", client.store(self._handle, keys, blocks).stored, BATCH)
        self._many = self._sequences * (LOOKUPS // SEQUENCES)

    def rate(self) -> float:
        """Lookups a second, pipelined."""
        begin = time.perf_counter()
        hits = self._client.lookup_many(self._handle, self._many)
        seconds = time.perf_counter() - begin
        expect("found by pipelined lookups", sum(hit.count for hit in hits), BATCH * LOOKUPS)
        return LOOKUPS / seconds

    def round_trip_us(self) -> float:
        """Median of lookups one at a time, in microseconds."""
        taken, found = [], 0
        for turn in range(ROUND_TRIPS):
            keys = self._sequences[turn % SEQUENCES]
            begin = time.perf_counter_ns()
            hit = self._client.lookup(self._handle, keys)
            taken.append(time.perf_counter_ns() - begin)
            found += hit.count
        expect("found by single lookups", found, BATCH * ROUND_TRIPS)
        return statistics.median(taken) / 1e3


def rows(options: Options) -> Iterator[Row]:
    """Measure the rate and the round trip."""
    rounds = options.rounds(15, 5)
    request, reply_bytes = frames_of_a_lookup()
    with tempfile.TemporaryDirectory(prefix="kvtierd-bench-") as folder:
        endpoint = f"ipc://{folder}/echo"
        settings = {"nvme__directory": "", "host__capacity": 64 * MIB, "gpu__capacity": 0}
        with (
            daemon_and_client(Path(folder) / "d", 1, **settings) as (_, client),
            echo_process(endpoint, reply_bytes),
        ):
            load, echo = LookupLoad(client), EchoClient(endpoint, request)
            try:
                yield from _measure(load, echo, rounds)
            finally:
                echo.close()


def _measure(load: LookupLoad, echo: EchoClient, rounds: int) -> Iterator[Row]:
    def echo_rate() -> float:
        return LOOKUPS / timed(lambda: echo.pipelined(LOOKUPS, MAX_UNANSWERED))

    def echo_round_trip_us() -> float:
        return statistics.median(echo.round_trips_ns(ROUND_TRIPS)) / 1e3

    ours, theirs = alternate([load.rate, echo_rate], rounds)
    yield make_row(
        "protocol",
        "lookups of 32 keys, pipelined",
        ours,
        "lookups/s",
        reference=theirs,
        reference_name=_ECHO,
        goal=">= 0.5",
    )
    ours, theirs = alternate([load.round_trip_us, echo_round_trip_us], rounds)
    yield make_row(
        "protocol",
        "lookup of 32 keys, median round trip",
        ours,
        "µs",
        reference=theirs,
        reference_name=_ECHO,
        goal="<= 2.5",
    )


def frames_of_a_lookup() -> tuple[list[bytes], int]:
    """Frames of the length of a real request, and the length of its reply."""
    number, far = 1 << 20, 1 << 62
    header = encode(Lookup(id=number, epoch=far, deadline_ns=far, namespaces=[1]))
    reply = encode(LookupReply(id=number, epoch=far, hit=BATCH, tiers=bytes(BATCH)))
    return [header, bytes(BATCH * KEY_BYTES)], len(reply)
