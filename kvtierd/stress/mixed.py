"""Mixed load: prompts come, share prefixes, are read again and deleted, while every byte read is compared."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtierd.core.errors import KvtierdError
from kvtierd.protocol.messages import TIER_NVME
from kvtierd.stress.content import BlockId
from kvtierd.stress.verify import Checked, check_lease

if TYPE_CHECKING:
    from kvtierd.stress.worker import Tools

Runs = tuple[tuple[int, int], ...]

SHARED_STREAMS = 4
"""Prefixes that all clients share, streams 1 to 4, as system prompts are."""
SHARED_BLOCKS, OWN_BLOCKS = 4, 12
"""Most blocks of a shared prefix, and behind it."""
OWN_STREAMS = 1 << 20
"""Streams of client n begin at (n + 1) times this."""
KEPT_PROMPTS = 64
"""A client deletes its oldest prompts beyond so many, which bounds what the load stores."""
BATCH = 16
LOOKUP_KEYS = 32


@dataclasses.dataclass(slots=True)
class Load:
    """One client's load: its prompts, and what happened."""

    tools: Tools
    rng: random.Random
    next_stream: int
    ledger: bool
    seconds: float
    allowed_bytes: int
    """Most that it may store, evenly over its time."""
    begin_s: float = dataclasses.field(default_factory=time.monotonic)
    stored_bytes: int = 0
    prompts: list[Runs] = dataclasses.field(default_factory=list)
    undurable: list[Runs] = dataclasses.field(default_factory=list)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    checked: Checked = dataclasses.field(default_factory=Checked)

    def step(self) -> None:
        """One thing that a client does."""
        choice = self.rng.random()
        if not self.prompts or (choice < 0.35 and self._may_store()):
            self._store()
        elif choice < 0.75:
            self._read(self.rng.choice(self.prompts))
        elif choice < 0.85:
            self._read_context()
        elif choice < 0.95:
            self._look_up(self.rng.choice(self.prompts))
        if len(self.prompts) > KEPT_PROMPTS or choice >= 0.97:
            self._delete()

    def _may_store(self) -> bool:
        share = (time.monotonic() - self.begin_s) / self.seconds
        return self.stored_bytes < self.allowed_bytes * share

    def _store(self) -> None:
        tools, runs = self.tools, self._new_prompt()
        keys, names = tools.content.keys(*runs), tools.content.ids(*runs)
        at = 0
        for reservation in tools.client.reservations(tools.handle, keys, batch=BATCH):
            granted = [i for i, view in enumerate(reservation.views) if view is not None]
            for i in granted:
                view = reservation.views[i]
                assert view is not None
                tools.content.fill(names[at + i], view)
            if granted:
                self.stored_bytes += len(granted) * tools.content.geometry.slot_bytes
                self._count_store(reservation.commit(), len(granted))
            at += len(reservation.status)
        self.prompts.append(runs)
        self.undurable.append(runs)

    def _count_store(self, committed: int, granted: int) -> None:
        self.counts["stored"] += committed
        self.counts["refused"] += granted - committed

    def _new_prompt(self) -> Runs:
        self.next_stream += 1
        own = (self.next_stream, self.rng.randint(1, OWN_BLOCKS))
        shared = self.rng.randint(0, SHARED_BLOCKS)
        return ((self.rng.randint(1, SHARED_STREAMS), shared), own) if shared else (own,)

    def _read(self, runs: Runs) -> None:
        self._check(self.tools.content.keys(*runs), self.tools.content.ids(*runs))

    def _read_context(self) -> None:
        """Some blocks of the long context: the others' reads push them out, ours bring them back."""
        if not self.tools.blocks:
            return
        begin = self.rng.randrange(self.tools.blocks)
        end = min(self.tools.blocks, begin + BATCH)
        self._check(self.tools.keys[begin:end], [BlockId(0, number) for number in range(begin, end)])

    def _check(self, keys: Any, names: list[BlockId]) -> None:
        at = 0
        for lease in self.tools.client.leases(self.tools.handle, keys, batch=BATCH):
            at += check_lease(self.tools, lease, names[at : at + lease.count], self.checked)
        self.counts["asked"] += len(names)
        self.counts["hit"] += at

    def _look_up(self, runs: Runs) -> None:
        keys = self.tools.content.keys(*runs)
        self.counts["lookups"] += 1
        self.counts["looked_up"] += len(keys)
        self.counts["found"] += self.tools.client.lookup(self.tools.handle, keys).count

    def _delete(self) -> None:
        """Forget the oldest prompt but for what it shares. It must not be found any more."""
        runs = self.prompts.pop(0)
        self.undurable = [other for other in self.undurable if other is not runs]
        if self.ledger:
            self.tools.tell(ledger={"forget": runs})
        keys, own = self.tools.content.keys(*runs), runs[-1][1]
        before = self._interruptions()
        self.counts["deleted"] += self.tools.client.delete(self.tools.handle, keys[-own:])
        left = self.tools.client.lookup(self.tools.handle, keys).count
        # In another life of the daemon the delete may have been lost on its way: that is a miss of the delete.
        if left > len(keys) - own and self._interruptions() == before:
            self.checked.wrong += 1
            self.checked.note(f"a deleted prompt of stream {runs[-1][0]} is found again: {left} of {len(keys)} blocks")

    def _interruptions(self) -> int:
        counters = self.tools.client.counters
        return counters["sessions"] + counters["requests_unavailable"]

    def settle(self) -> None:
        """Tell the parent which prompts are on stable storage now: these must survive anything.

        A block that is on disk before a flush is durable after it; one that a full queue had put off may come behind
        the first flush, and is no claim of the daemon's before the second.
        """
        tools, waiting, self.undurable = self.tools, self.undurable, []
        tools.client.flush()
        written = [runs for runs in waiting if self._on_disk(runs)]
        tools.client.flush()
        for runs in written:
            self.counts["durable"] += sum(blocks for _, blocks in runs)
            if self.ledger:
                tools.tell(ledger={"durable": runs})

    def _on_disk(self, runs: Runs) -> bool:
        keys = self.tools.content.keys(*runs)
        hit = self.tools.client.lookup(self.tools.handle, keys)
        return hit.count == len(keys) and bool((hit.tiers & TIER_NVME).all())


def mixed(tools: Tools, command: Mapping[str, Any]) -> dict[str, Any]:
    """Load for `seconds`. Errors of a daemon that is away, busy or short of disk are counted: a cache may say no."""
    number = command["round"] * 1000 + tools.number
    load = Load(
        tools,
        random.Random(tools.content.seed * 1_000_003 + number),
        (number + 1) * OWN_STREAMS,
        ledger=command["ledger"],
        seconds=command["seconds"],
        allowed_bytes=command["allowed_bytes"],
    )
    steps = 0
    while time.monotonic() < load.begin_s + load.seconds:
        try:
            load.step()
            steps += 1
            if steps % command["settle_every"] == 0:
                load.settle()
        except KvtierdError as error:
            load.counts[f"refused: {type(error).__name__}"] += 1
            time.sleep(0.02)
        tools.tell(progress=1)
    return {"steps": steps, "seconds": time.monotonic() - load.begin_s, "counts": dict(load.counts),
            "prompts": load.prompts, "checked": load.checked.result()}  # fmt: skip


def lookups(tools: Tools, command: Mapping[str, Any]) -> dict[str, float]:
    """Lookups of 32 keys of the context, one after the other, for `seconds`."""
    rng, count, found = np.random.default_rng(tools.number), 0, 0
    last = max(1, tools.blocks - LOOKUP_KEYS)
    begin_s = time.perf_counter()
    while time.perf_counter() < begin_s + command["seconds"]:
        at = int(rng.integers(last))
        found += tools.client.lookup(tools.handle, tools.keys[at : at + LOOKUP_KEYS]).count
        count += 1
    return {"lookups": count, "found": found, "seconds": time.perf_counter() - begin_s}


def look(tools: Tools, _command: Mapping[str, Any]) -> int:
    """One lookup. Where the daemon has died the client learns of it, and lets go of its memory."""
    return tools.client.lookup(tools.handle, tools.keys[:1]).count
