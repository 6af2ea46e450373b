"""Fuzzed messages to a real daemon, on its socket and on the arena's: no crash, no internal error, nobody else hurt.

A bystander stores and reads throughout; its bytes must be right, though garbage that happens to be a valid purge may
make them a miss. Descriptors, threads and memory of the daemon must not grow with what it was sent.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvtierd import Client
from kvtierd.bench.smaps import total_bytes
from kvtierd.core.errors import ErrorCode, KvtierdError
from kvtierd.core.units import MIB
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.protocol.codec import encode
from kvtierd.protocol.messages import (
    ArenaHello,
    ArenaMap,
    ErrorReply,
    NamespaceReply,
    RegisterNamespace,
    Stats,
)
from kvtierd.testing.raw_client import RawClient
from tests.torture import garbage
from tests.torture.cycles import count_of
from tests.torture.logs import complaints
from tests.torture.parts import Part, Unit
from tests.torture.prompts import SPACE, content_of, keys_of, wrong_blocks
from tests.torture.raw_arena import arena_of, attach

BURST = 100
"""Messages between two looks at what came back."""
ARENA_EVERY = 50
"""Bursts between two connections to the arena's socket."""
GROWTH_BYTES = 24 * MIB
"""Of the daemon beside its pools, from the end of the first fifth of a unit: what an allocator may keep."""
SETTINGS: dict[str, Any] = {
    "host__capacity": "16MiB",
    "host__chunk_bytes": "1MiB",
    "gpu__capacity": "4MiB",
    "nvme__capacity": "64MiB",
    "nvme__segment_bytes": "4MiB",
    "leases__reservation_ttl_ms": 200,
    "attention__staging_bytes": "1MiB",
}


class Attacker:
    """Sessions one after the other: what ends one costs its sender nothing but that."""

    def __init__(self, endpoint: str, seed: int) -> None:
        self._endpoint = endpoint
        self.garbage = garbage.Garbage(seed)
        self._client, self._arena = self._session()

    def _session(self) -> tuple[RawClient, socket.socket]:
        client = RawClient(self._endpoint)
        client.hello()
        client.ask(RegisterNamespace(id=0, namespace=garbage.SPACE), NamespaceReply)
        arena = attach(self._endpoint, client.token)  # so that reservations and leases are granted
        self.garbage.epoch = client.epoch
        return client, arena

    def burst(self, count: int) -> Iterator[str]:
        """Send messages, and read what comes until a marker behind them is answered."""
        messages = [self.garbage.message() for _ in range(count)]
        for message in messages:
            self._client.send(*message)
        marker = (1 << 62) + self.garbage.rng.randrange(1 << 40)
        self._client.send(encode(Stats(id=marker, epoch=self._client.epoch)))
        while True:
            reply, _ = self._client.receive()
            self.garbage.note(reply)
            if isinstance(reply, ErrorReply) and reply.code == ErrorCode.INTERNAL:
                yield f"an internal error was the answer to one of {count} messages: {reply.message}"
            if reply.id == marker:
                break
        if isinstance(reply, ErrorReply):
            # A header that happened to be a goodbye, or a hello of another kind: go on as another client.
            self.close()
            self._client, self._arena = self._session()

    def close(self) -> None:
        """Hang up."""
        self._client.close()
        self._arena.close()


def run(unit: Unit) -> Iterator[str]:
    """Send `unit.amount` messages."""
    bursts = max(1, unit.amount // BURST)
    with (
        EmbeddedDaemon(unit.folder / "d", **SETTINGS) as daemon,
        Client(daemon.endpoint, timeout_s=10, transfer_timeout_s=20) as bystander,
        contextlib.closing(Attacker(daemon.endpoint, unit.seed)) as attacker,
    ):
        before = None
        for number in range(bursts):
            try:
                yield from attacker.burst(BURST)
            except zmq.Again:
                yield f"no answer within 20 s to burst {number}; the daemon {_state(daemon)}"
                return
            if number % ARENA_EVERY == 0:
                _plug(daemon, attacker)
                yield from _bystander_is_served(bystander, number)
            if number == bursts // 5:
                before = _held(daemon.pid)
        yield from _grown(before, _held(daemon.pid))
    if daemon.exit_code:
        yield f"the daemon ended with {daemon.exit_code}"
    # Garbage commits slots with sums of other bytes, in namespaces that it may have misspelt: that the daemon finds out
    # and says so is as it should be, but of the bystander's.
    lied = "changed before it was stored"
    honest = f"namespace={SPACE.model} "
    yield from (line for line in complaints(daemon.log_path) if lied not in line or honest in line)


def _state(daemon: EmbeddedDaemon) -> str:
    return "has ended" if not Path(f"/proc/{daemon.pid}/task").exists() else "still runs"


def _plug(daemon: EmbeddedDaemon, attacker: Attacker) -> None:
    """Garbage to the socket that hands over descriptors; it hangs up on that."""
    rng = attacker.garbage.rng
    with arena_of(daemon.endpoint) as plug:
        told = [rng.randbytes(rng.randrange(1, 2000)), msgspec.msgpack.encode(ArenaHello(rng.randbytes(16)))]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for message in (*told, msgspec.msgpack.encode(ArenaMap(rng.randrange(4)))):
                plug.send(message)
            while plug.recv(4096):
                pass


def _bystander_is_served(client: Client, number: int) -> Iterator[str]:
    keys = keys_of(number % 7, 4)
    try:
        space = client.register(SPACE)
        client.store(space, keys, content_of(keys))
        found = client.fetch(space, keys)
        client.stats()
    except KvtierdError as error:
        yield f"another client got {type(error).__name__} at burst {number}: {error}"
        return
    if wrong := wrong_blocks(found.blocks[: found.count], keys):
        yield f"another client read wrong bytes at burst {number}: blocks {wrong}"


def _held(pid: int) -> dict[str, int]:
    """What a process holds."""
    return {
        "descriptors": count_of(pid, "fd"),
        "threads": count_of(pid, "task"),
        "bytes": total_bytes(pid),
    }


def _grown(before: dict[str, int] | None, after: dict[str, int]) -> Iterator[str]:
    allowed = {"descriptors": 4, "threads": 1, "bytes": GROWTH_BYTES}
    for name, most in allowed.items():
        if before is not None and after[name] - before[name] > most:
            yield f"the daemon's {name} grew from {before[name]:,} to {after[name]:,} while it was sent garbage"


PART = Part("frames", "fuzzed messages", 1_000_000, 3_000, 50_000, run)
