"""Every kind of call to the disk stands still in turn, and every request is answered all the same, within its deadline.

While a call stands a session asks for everything at once with a short deadline: what needs the disk is answered
`deadline`, `busy` or with a miss, and what does not is served. Another client reads what is in host and stores anew.
Then the disk goes on: a flush ends, no byte is wrong, and nothing is held by requests that were given up.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq

from kvtierd import Client
from kvtierd.core.checksum import block_sums, layer_sums
from kvtierd.core.errors import ErrorCode, KvtierdError
from kvtierd.core.keys import Keys
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.protocol import messages as m
from kvtierd.protocol.granted import giving_back
from kvtierd.testing.raw_client import RawClient
from kvtierd.testing.waiting import wait_for
from tests.torture.logs import complaints
from tests.torture.parts import Part, Unit
from tests.torture.prompts import SHAPE, SPACE, content_of, keys_of, wrong_blocks
from tests.torture.raw_arena import attach

OPERATIONS = ("read", "write", "sync", "create", "punch", "create_small", "append_small", "sync_small", "replace_small")
DEADLINE_S = 0.5
LATE_S = 10.0
"""So long after its deadline an answer is not late because of a busy machine; the disk stands longer than that."""
REQUESTS = 25
"""Of one kind of call, some of which are asked for twice."""
BLOCKS = 4
SETTINGS: dict[str, Any] = {
    "host__capacity": "16MiB",
    "host__chunk_bytes": "1MiB",
    "gpu__capacity": "2MiB",
    "nvme__capacity": "64MiB",
    "nvme__segment_bytes": "4MiB",
    "attention__staging_bytes": "1MiB",
}
WATCHDOG = "watchdog is not fed"
"""What a daemon rightly says of a disk that stands still for long."""

Asked = tuple[m.AnyRequest, list[bytes]]


class Disk:
    """The file that says what the daemon's disk does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def stand(self, operation: str) -> None:
        """From now on calls of this kind do not return."""
        self._write([{"operation": operation, "share": 1.0, "stands": True}])

    def go_on(self) -> None:
        """All of them do."""
        self._write([])

    def _write(self, faults: list[dict[str, Any]]) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"seed": 1, "faults": faults}))
        new.replace(self.path)


def run(unit: Unit) -> Iterator[str]:
    """Send `unit.amount` requests, while each kind of call stands in turn."""
    disk, rng = Disk(unit.folder / "faults.json"), random.Random(unit.seed)
    disk.go_on()
    settings = SETTINGS | {"testing__disk_faults": str(disk.path)}
    with (
        EmbeddedDaemon(unit.folder / "d", **settings) as daemon,
        Client(daemon.endpoint, timeout_s=20, transfer_timeout_s=20) as client,
    ):
        for number in range(0, unit.amount, REQUESTS):
            operation = OPERATIONS[number // REQUESTS % len(OPERATIONS)]
            for finding in _one(daemon, client, disk, rng, operation, number, min(REQUESTS, unit.amount - number)):
                yield f"{operation} stood still: {finding}"
    if daemon.exit_code:
        yield f"the daemon ended with {daemon.exit_code}"
    yield from (line for line in complaints(daemon.log_path) if WATCHDOG not in line)


def _one(
    daemon: EmbeddedDaemon, client: Client, disk: Disk, rng: random.Random, operation: str, number: int, count: int
) -> Iterator[str]:
    """One stall, with a session of its own."""
    with contextlib.closing(RawClient(daemon.endpoint)) as raw:
        raw.hello()
        with contextlib.closing(attach(daemon.endpoint, raw.token)):
            yield from Stage(client, raw, disk, rng, 10 * (number // REQUESTS)).play(operation, count)


class Stage:
    """One stall: prompts from `first` on are its own."""

    def __init__(self, client: Client, raw: RawClient, disk: Disk, rng: random.Random, first: int) -> None:
        self._client, self._raw, self._disk, self._rng = client, raw, disk, rng
        self._cold, self._hot, self._fresh, self._doomed = (keys_of(first + i, BLOCKS) for i in range(4))
        self.unused = keys_of(first + 4, 1)
        self._space = client.register(SPACE)

    def play(self, operation: str, count: int) -> Iterator[str]:
        """Store, stand, ask, go on, look."""
        self._store(self._cold, self._doomed)
        self._client.flush()
        self._client.purge(self._space, tiers=["host", "gpu"])
        self._store(self._hot)
        number = self._raw.ask(m.RegisterNamespace(id=0, namespace=SPACE), m.NamespaceReply)[0].namespace
        sequence = self._raw.ask(
            m.OpenSequence(id=0, namespace=number, ttl_ms=60_000), m.SequenceReply, [self._cold.tobytes()]
        )[0].sequence
        self._disk.stand(operation)
        try:
            yield from ask_all(self._raw, self._rng, self._some(requests(self, number, sequence), count))
            yield from self._others_are_served()
        finally:
            self._disk.go_on()
        yield from self._all_is_well()
        self._raw.post(m.CloseSequence(id=0, sequences=[sequence], quiet=True))

    @property
    def keys(self) -> tuple[Keys, Keys, Keys]:
        """Of prompts: on nvme only, in host, and to be deleted."""
        return self._cold, self._hot, self._doomed

    def _store(self, *prompts: Keys) -> None:
        for keys in prompts:
            self._client.store(self._space, keys, content_of(keys))

    def _some(self, asked: list[Asked], count: int) -> list[Asked]:
        """So many, in any order; some of them twice where there are too few."""
        chosen = [self._rng.choice(asked) for _ in range(count - len(asked))] + asked
        self._rng.shuffle(chosen)
        return chosen[:count]

    def _others_are_served(self) -> Iterator[str]:
        """What is in host is read and stores go on, whatever the disk does."""
        for what, act in (("read what is in host", self._read_hot), ("store", self._store_fresh)):
            begin_s = time.monotonic()
            try:
                if not act():
                    yield f"another client could not {what}"
            except KvtierdError as error:
                yield f"another client could not {what}: {error}"
            if time.monotonic() - begin_s > LATE_S:
                yield f"another client waited more than {LATE_S:.0f} s to {what}"

    def _read_hot(self) -> bool:
        found = self._client.fetch(self._space, self._hot)
        return found.count == BLOCKS and not wrong_blocks(found.blocks[:BLOCKS], self._hot)

    def _store_fresh(self) -> bool:
        return self._client.store(self._space, self._fresh, content_of(self._fresh)).stored == BLOCKS

    def _all_is_well(self) -> Iterator[str]:
        """The disk works again, and so does everything."""
        try:
            self._client.flush(timeout_s=60)
        except KvtierdError as error:
            yield f"a flush did not end afterwards: {error}"
        for name, keys in (("cold", self._cold), ("hot", self._hot), ("fresh", self._fresh)):
            found = self._client.fetch(self._space, keys, timeout_s=60)
            if wrong := wrong_blocks(found.blocks[: found.count], keys):
                yield f"blocks {wrong} of the {name} prompt have other bytes afterwards"
            if found.count < BLOCKS:
                yield f"{found.count} of {BLOCKS} blocks of the {name} prompt are there afterwards"
        try:
            wait_for(lambda: not self._client.stats()["leases"])
        except AssertionError:
            yield f"{self._client.stats()['leases']} leases are held afterwards"


def ask_all(raw: RawClient, rng: random.Random, asked: list[Asked]) -> Iterator[str]:
    """All at once. Each must be answered, and not by a fault of the daemon's."""
    waiting: dict[int, str] = {}
    for request, frames in asked:
        request.deadline_ns = time.monotonic_ns() + int(DEADLINE_S * 1e9)
        waiting[raw.post(request, frames)] = type(request).__name__
        time.sleep(rng.choice((0.0, 0.0, 0.003)))  # some are taken up together, some when others wait
    end_s = time.monotonic() + DEADLINE_S + LATE_S
    while waiting and (left_s := end_s - time.monotonic()) > 0:
        if raw.silent(left_s):
            break
        with contextlib.suppress(zmq.Again):
            reply, _ = raw.receive()
            name = waiting.pop(reply.id, "")
            if isinstance(reply, m.ErrorReply) and reply.code == ErrorCode.INTERNAL:
                yield f"{name} was answered by an internal error: {reply.message}"
            if (release := giving_back(reply)) is not None and name != "OpenSequence":
                raw.post(release)
    yield from (f"{name} had no answer {LATE_S:.0f} s after its deadline" for name in sorted(waiting.values()))


def requests(stage: Stage, number: int, sequence: int) -> list[Asked]:
    """One of each kind, most of them about blocks that are on nvme only."""
    cold, hot, doomed = (keys.tobytes() for keys in stage.keys)
    fresh = stage.unused
    block = content_of(fresh)[0]
    total = block_sums(layer_sums(block, SHAPE)[None]).tobytes()
    heads = bytes(2 * SHAPE.k_dim * 4)
    makers: list[Callable[[], Asked]] = [
        lambda: (m.Hello(id=0, client="raw"), []),
        lambda: (m.RegisterNamespace(id=0, namespace=SPACE), []),
        lambda: (m.Lookup(id=0, namespaces=[number]), [cold]),
        lambda: (m.Reserve(id=0, namespace=number), [fresh.tobytes()]),
        lambda: (m.Acquire(id=0, namespace=number), [cold]),
        lambda: (m.Acquire(id=0, namespace=number, verify=True), [hot]),
        lambda: (m.AcquirePart(id=0, namespace=number, begin=8, end=100), [cold]),
        lambda: (m.Put(id=0, namespace=number), [fresh.tobytes(), total, block.tobytes()]),
        lambda: (m.Get(id=0, namespace=number), [cold]),
        lambda: (m.Get(id=0, namespace=number), [hot]),
        lambda: (m.Prefetch(id=0, namespace=number, tier="host", wait=True), [cold]),
        lambda: (m.Prefetch(id=0, namespace=number, tier="gpu", wait=True), [cold]),
        lambda: (m.Pin(id=0, namespace=number), [hot]),
        lambda: (m.Unpin(id=0, namespace=number), [hot]),
        lambda: (m.Delete(id=0, namespace=number), [doomed]),
        lambda: (m.Reshape(id=0, namespace=number, parts=[128, 128]), [cold]),
        lambda: (m.Purge(id=0, namespace=number, tiers=["gpu"]), []),
        lambda: (m.Flush(id=0), []),
        lambda: (m.Stats(id=0), []),
        lambda: (m.OpenSequence(id=0, namespace=number, ttl_ms=1000), [cold]),
        lambda: (m.Attend(id=0, sequence=sequence, layers=[0, 1], queries=1, heads=4), [heads, heads]),
    ]
    return [make() for make in makers]


PART = Part("stalls", "requests while the disk stands still", 40 * len(OPERATIONS) * REQUESTS,
            len(OPERATIONS) * REQUESTS, 4 * len(OPERATIONS) * REQUESTS, run)  # fmt: skip
