"""The mixed load as the parent sees it: who has claimed what, and, with chaos, what is done to everybody meanwhile.

Clients tell which prompts are on stable storage (the ledger). Whatever happens after that (a client killed, the daemon
killed and started again, a disk that refuses, tears and stalls), these must come back, byte for byte.
"""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.stress.mixed import Runs
from kvtierd.stress.processes import SILENCE_S, ClientProcess, Crew, StressError

SETTLE_EVERY = 12
"""Steps of a client between two entries in the ledger."""
PAUSE_S = 1.5
"""Of quiet load between two blows."""
FAULTY_S = 2.0
"""How long the disk misbehaves."""
DISK_FAULTS: tuple[list[dict[str, Any]], ...] = (
    [{"operation": "write", "share": 0.2, "errno": "EIO", "bytes_moved": 8192}],
    [{"operation": "read", "share": 0.05, "errno": "EIO"}],
    [{"operation": "sync", "share": 0.5, "errno": "EIO"}],
    [{"operation": "write", "share": 1.0, "errno": "ENOSPC"}, {"operation": "create", "share": 1.0, "errno": "ENOSPC"}],
    [{"operation": "append_small", "share": 0.3, "errno": "EIO", "bytes_moved": 17}],
    [{"operation": "write", "share": 0.3, "delay_ms": 150}, {"operation": "read", "share": 0.1, "delay_ms": 150}],
    [{"operation": "read", "share": 0.05, "errno": "", "bytes_moved": 4096}],
)
"""Torn writes, failing reads, failing syncs, a full disk, a torn journal, a slow disk, short reads."""


@dataclasses.dataclass(slots=True)
class Tally:
    """What happened under load."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    checked: Counter[str] = dataclasses.field(default_factory=Counter)
    findings: list[str] = dataclasses.field(default_factory=list)
    events: Counter[str] = dataclasses.field(default_factory=Counter)
    seconds: float = 0.0


class Load:
    """Keeps every client under mixed load and the ledger up to date."""

    def __init__(self, crew: Crew, allowed_bytes: int, progress: Callable[[int], None]) -> None:
        self._crew, self._progress = crew, progress
        self._allowed_bytes = allowed_bytes // len(crew.members)
        """Most that each client may store, however often it is killed."""
        self.ledger: dict[Runs, None] = {}
        self.tally = Tally()
        self._round = 0
        self._bytes_a_second = 0.0
        self._waiting: dict[int, str] = {}
        """What each client is at: `load`, or `start` until it is ready."""

    def run(self, seconds: float, blows: Iterator[Callable[[], None]] | None = None) -> None:
        """Load for so long; blows fall one after the other with a pause between them."""
        begin_s = time.monotonic()
        end_s = begin_s + seconds
        self._bytes_a_second = self._allowed_bytes / seconds
        for number in range(len(self._crew.members)):
            self._begin(number, seconds)
        next_s = begin_s + PAUSE_S
        while self._waiting:
            now_s = time.monotonic()
            self._progress(int(now_s - begin_s))
            if blows is not None and next_s <= now_s < end_s:
                next(blows)()
                next_s = time.monotonic() + PAUSE_S
            self._hear_all(end_s)
            if now_s > end_s + SILENCE_S:
                raise StressError(f"clients {sorted(self._waiting)} do not come to an end")
            time.sleep(0.005)
        self.tally.seconds += time.monotonic() - begin_s

    def _begin(self, number: int, seconds: float) -> None:
        self._round += 1
        self._waiting[number] = "load"
        self._crew.members[number].tell(
            {
                "do": "mixed",
                "seconds": seconds,
                "round": self._round,
                "ledger": True,
                "settle_every": SETTLE_EVERY,
                "allowed_bytes": int(seconds * self._bytes_a_second),
            }
        )

    def _hear_all(self, end_s: float) -> None:
        for number in list(self._waiting):
            member = self._crew.members[number]
            while member.heard():
                message = member.hear()
                self._take(message)
                if "done" not in message:
                    continue
                left_s = end_s - time.monotonic()
                if self._waiting.pop(number) == "start" and left_s > 0.5:
                    self._begin(number, left_s)
                    break

    def _take(self, message: Mapping[str, Any]) -> None:
        if entry := message.get("ledger"):
            if "durable" in entry:
                self.ledger[_runs(entry["durable"])] = None
            else:
                self.ledger.pop(_runs(entry["forget"]), None)
        if isinstance(result := message.get("done"), dict):
            self._count(result)

    def _count(self, result: Mapping[str, Any]) -> None:
        self.tally.counts.update(result["counts"])
        checked = result["checked"]
        self.tally.checked.update({name: checked[name] for name in ("blocks", "lossy", "wrong")})
        self.tally.findings += checked["findings"]

    def replace(self, number: int) -> None:
        """Kill a client; another takes its place. What it said before counts."""
        old, _ = self._crew.replace(number)
        self._drain(old)
        self._waiting[number] = "start"
        self.tally.events["clients killed"] += 1

    def _drain(self, old: ClientProcess) -> None:
        for message in old.last_words():
            self._take(message)


class Chaos:
    """What falls upon clients, daemon and disk, in an order that the seed gives."""

    def __init__(self, seed: int, load: Load, daemon: EmbeddedDaemon, clients: int, faults: Path) -> None:
        self._rng = random.Random(seed)
        self._load, self._daemon, self._clients, self._faults = load, daemon, clients, faults

    def blows(self) -> Iterator[Callable[[], None]]:
        """Every kind in turn, shuffled, for ever."""
        kinds: list[Callable[[], None]] = [
            self.kill_a_client,
            self.kill_the_daemon,
            *(partial(self.misbehave, faults) for faults in DISK_FAULTS),
        ]
        while True:
            self._rng.shuffle(kinds)
            yield from kinds

    def kill_a_client(self) -> None:
        """SIGKILL, in the middle of whatever it does."""
        self._load.replace(self._rng.randrange(self._clients))

    def kill_the_daemon(self) -> None:
        """SIGKILL, and start it again on the same folders."""
        self._daemon.kill()
        self._load.tally.events["daemon killed"] += 1
        self._daemon.start()

    def misbehave(self, faults: list[dict[str, Any]]) -> None:
        """The disk does for a while what `faults` say."""
        self._write(faults)
        self._load.tally.events["disk faults"] += 1
        end_s = time.monotonic() + FAULTY_S
        while time.monotonic() < end_s:
            time.sleep(0.05)
        self._write([])

    def _write(self, faults: list[dict[str, Any]]) -> None:
        # Renamed into place: the daemon must never read half of it.
        new = self._faults.with_suffix(".new")
        new.write_text(json.dumps({"seed": self._rng.randrange(1 << 30), "faults": faults}))
        new.replace(self._faults)


def _runs(entry: Any) -> Runs:
    return tuple((int(stream), int(blocks)) for stream, blocks in entry)
