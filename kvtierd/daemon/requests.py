"""What requests did: how long they took, what they found, which were slow, and a stream of them for who watches."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from kvtierd.core.clock import Clock
from kvtierd.protocol.messages import (
    TIER_GPU,
    TIER_HOST,
    TIER_NVME,
    AnyReply,
    AnyRequest,
    Commit,
    Lookup,
    LookupReply,
    Tier,
)
from kvtierd.protocol.service import Session
from kvtierd.telemetry.prometheus import Histogram
from kvtierd.tiers.blocks import RESIDENT
from kvtierd.tiers.copies import EventSink
from kvtierd.tiers.sessions import state_of

BOUNDS_S = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
SLOW_ENTRIES = 512
WATCHED_ENTRIES = 8192
WATCHER_PATIENCE_NS = 10_000_000_000
"""Entries are kept for a watcher that asked within this time; without one nothing is recorded."""
WATCHED_BETWEEN = 512
"""Most entries kept between two questions of a watcher, more than a terminal shows meanwhile; the rest is counted."""
KEY_DIGITS = 16
_KEY_BYTES = 32

_TIERS: dict[Tier, int] = {"gpu": TIER_GPU, "host": TIER_HOST, "nvme": TIER_NVME}
assert TIER_GPU < TIER_HOST < TIER_NVME, "the lowest bit of a residency mask is its fastest tier"

Entry = dict[str, Any]
Frames = Sequence[memoryview]
Outcome = AnyReply | str

T = TypeVar("T")


class Ring(Generic[T]):
    """The last entries, numbered from the first one ever, so that a reader sees how many it missed."""

    def __init__(self, limit: int) -> None:
        self._entries: collections.deque[tuple[int, T]] = collections.deque(maxlen=limit)
        self.next = 0

    def add(self, entry: T) -> None:
        """Append; the oldest goes when the ring is full."""
        self._entries.append((self.next, entry))
        self.next += 1

    def skip(self) -> None:
        """Count an entry that is not kept."""
        self.next += 1

    def since(self, number: int, limit: int) -> tuple[list[T], int, int]:
        """Entries from `number` on, the newest ones: (entries, number to ask for next, how many are not among them)."""
        # From the end: a deque is slow to index in its middle, and a reader wants the newest.
        recent = itertools.takewhile(lambda item: item[0] >= number, reversed(self._entries))
        found = [entry for _, entry in itertools.islice(recent, limit)][::-1]
        return found, self.next, max(0, self.next - max(0, number) - len(found))


class Noted(NamedTuple):
    """A request as it is kept: made into words only when somebody reads it, for most are never read."""

    end_ns: int
    duration_ns: int
    session: Session
    request: AnyRequest
    blocks: int
    outcome: Outcome


Happened = Noted | Entry


@dataclasses.dataclass(slots=True)
class Tokens:
    """Tokens that lookups asked for, and those found, by residency mask."""

    asked: int = 0
    by_mask: list[int] = dataclasses.field(default_factory=lambda: [0] * (RESIDENT + 1))

    def hits(self, tier: Tier) -> int:
        """Tokens whose fastest copy is in this tier: no faster tier's bit is in their mask."""
        bit = _TIERS[tier]
        return sum(count for mask, count in enumerate(self.by_mask) if mask & bit and not mask & (bit - 1))


class RequestLog:
    """Observes one endpoint's requests (protocol.service.Observer). All on the loop."""

    def __init__(self, clock: Clock, slow_ms: int) -> None:
        self.slow_ms = slow_ms
        self.slow: Ring[Happened] = Ring(SLOW_ENTRIES)
        self.watched: Ring[Happened] = Ring(WATCHED_ENTRIES)
        self._now_ns = clock.now_ns
        self._seconds: dict[type, Histogram] = {}
        self._tokens: dict[str, Tokens] = {}
        """By tenant."""
        self._watching_until_ns = -1
        self._room = 0

    def __call__(self, session: Session, request: AnyRequest, frames: Frames, begin_ns: int, outcome: Outcome) -> None:
        """Take note of one request. This is on the way of every one: a microsecond here is a microsecond for all."""
        now_ns = self._now_ns()
        duration_ns = now_ns - begin_ns
        kind = type(request)
        histogram = self._seconds.get(kind)
        if histogram is None:
            histogram = self._seconds[kind] = Histogram(BOUNDS_S)
        histogram.add(duration_ns)
        if type(outcome) is LookupReply:
            self._found(session, request, frames, outcome)  # type: ignore[arg-type]
        if duration_ns >= self.slow_ms * 1_000_000:
            self.slow.add(_noted(now_ns, duration_ns, session, request, frames, outcome))
        if now_ns < self._watching_until_ns:
            if self._room > 0:
                self._room -= 1
                self.watched.add(_noted(now_ns, duration_ns, session, request, frames, outcome))
            else:
                self.watched.skip()

    @property
    def seconds(self) -> dict[str, Histogram]:
        """How long requests took, by operation."""
        return {_operation(kind): histogram for kind, histogram in self._seconds.items()}

    def slow_since(self, number: int) -> tuple[list[Entry], int, int]:
        """Slow requests from `number` on, as Ring.since."""
        return self._read(self.slow, number, SLOW_ENTRIES)

    def watch(self, number: int) -> tuple[list[Entry], int, int]:
        """What happened since `number` (-1: from now on), and have it recorded for a while."""
        self._watching_until_ns = self._now_ns() + WATCHER_PATIENCE_NS
        self._room = WATCHED_BETWEEN
        return self._read(self.watched, self.watched.next if number < 0 else number, WATCHED_ENTRIES)

    def _read(self, ring: Ring[Happened], number: int, limit: int) -> tuple[list[Entry], int, int]:
        entries, following, skipped = ring.since(number, limit)
        now_ns, now = self._now_ns(), dt.datetime.now(dt.UTC)
        return [_in_words(entry, now_ns, now) for entry in entries], following, skipped

    def note(self, entry: Entry) -> None:
        """Have a watcher see something that is no request."""
        if self._room > 0:
            self._room -= 1
            self.watched.add(entry)
        else:
            self.watched.skip()

    @property
    def is_watched(self) -> bool:
        """Whether somebody wants to know what happens."""
        return self._now_ns() < self._watching_until_ns

    def statistics(self) -> Mapping[str, int]:
        """Tokens looked up and found, by name (rows of kvtierd.telemetry.metrics)."""
        every = self._tokens.values()
        return {
            "lookup_tokens": sum(tokens.asked for tokens in every),
            **{f"hit_{tier}_tokens": sum(tokens.hits(tier) for tokens in every) for tier in _TIERS},
        }

    def tokens_of(self, tenant: str) -> Tokens:
        """What the lookups of a tenant asked for and found."""
        return self._tokens.get(tenant, Tokens())

    def _found(self, session: Session, request: Lookup, frames: Frames, reply: LookupReply) -> None:
        tokens = session.state.namespaces[request.namespaces[0] - 1].namespace.geometry.block_size
        counted = self._tokens.get(session.tenant)
        if counted is None:
            counted = self._tokens[session.tenant] = Tokens()
        counted.asked += frames[0].nbytes // _KEY_BYTES * tokens
        tiers, hit = reply.tiers, reply.hit
        if not hit:
            return
        if tiers.count(tiers[0]) == hit:  # nearly always all blocks of a prefix have the same residency
            counted.by_mask[tiers[0]] += hit * tokens
            return
        for mask in range(1, RESIDENT + 1):
            counted.by_mask[mask] += tiers.count(mask) * tokens


def _noted(
    now_ns: int, duration_ns: int, session: Session, request: AnyRequest, frames: Frames, outcome: Outcome
) -> Noted:
    blocks = frames[0].nbytes // _KEY_BYTES if frames and type(request) is not Commit else 0
    return Noted(now_ns, duration_ns, session, request, blocks, outcome)


class WatchedEvents:
    """Passes events of blocks on, and notes them for a watcher (tiers.copies.EventSink)."""

    def __init__(self, sink: EventSink, requests: RequestLog) -> None:
        self._sink = sink
        self._requests = requests

    def wanted(self) -> bool:
        """Whether a subscriber listens, or a watcher."""
        return self._sink.wanted() or self._requests.is_watched

    def stored(self, keys: Sequence[bytes], parent: bytes | None, block_size: int, medium: str) -> None:
        """Blocks became visible."""
        self._sink.stored(keys, parent, block_size, medium)
        if self._requests.is_watched:
            self._note("stored", keys, medium)

    def removed(self, keys: Sequence[bytes], medium: str) -> None:
        """Blocks are gone."""
        self._sink.removed(keys, medium)
        if self._requests.is_watched:
            self._note("removed", keys, medium)

    def _note(self, what: str, keys: Sequence[bytes], medium: str) -> None:
        first = keys[0].hex()[:KEY_DIGITS] if keys else ""
        time = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
        entry = {"time": time, "what": what, "tier": medium, "blocks": len(keys), "first_key": first}
        self._requests.note(entry)


def _in_words(entry: Happened, now_ns: int, now: dt.datetime) -> Entry:
    """An entry as an operator reads it: no keys but the first one's beginning, no payload."""
    if not isinstance(entry, Noted):
        return entry
    session, request = entry.session, entry.request
    named = getattr(request, "namespace", 0) or next(iter(getattr(request, "namespaces", ())), 0)
    number = named if isinstance(named, int) else 0  # `register` carries the namespace itself
    known = state_of(session).namespaces
    return {
        "time": (now - dt.timedelta(microseconds=(now_ns - entry.end_ns) / 1000)).isoformat(timespec="milliseconds"),
        "what": _operation(type(request)),
        "client": session.client,
        "pid": session.pid,
        "namespace": known[number - 1].namespace.model if 0 < number <= len(known) else "",
        "blocks": entry.blocks,
        "ms": round(entry.duration_ns / 1e6, 3),
        "outcome": entry.outcome if isinstance(entry.outcome, str) else _outcome(entry.outcome),
    }


def _operation(kind: type) -> str:
    return str(kind.__struct_config__.tag)  # type: ignore[attr-defined]


def _outcome(reply: AnyReply) -> str:
    for name in ("hit", "count", "granted", "committed", "stored"):
        if (count := getattr(reply, name, None)) is not None:
            return f"{name} {count}"
    return "ok"
