"""What requests did: how long they took, what they found, which were slow, and a stream of them for who watches."""

from __future__ import annotations

import collections
import datetime as dt
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from kvtierd.core.clock import Clock
from kvtierd.protocol.messages import AnyReply, AnyRequest, Commit, Lookup, LookupReply
from kvtierd.protocol.service import Session
from kvtierd.telemetry.prometheus import Histogram
from kvtierd.tiers.copies import EventSink
from kvtierd.tiers.sessions import namespace_of, state_of

BOUNDS_S = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
SLOW_ENTRIES = 512
WATCHED_ENTRIES = 8192
WATCHER_PATIENCE_NS = 10_000_000_000
"""Entries are kept for a watcher that asked within this time; without one nothing is recorded."""
WATCH_PAGE_ENTRIES = 256
"""Most entries of one answer: more than a terminal shows between two questions, and little enough to put into words."""
KEY_DIGITS = 16
_KEY_BYTES = 32

# The fastest tier of a residency mask is its lowest bit (gpu 1, host 2, nvme 4).
_FASTEST = bytes(mask & -mask for mask in range(256))
_TIER_OF_BIT = {1: "gpu", 2: "host", 4: "nvme"}

Entry = dict[str, Any]
Frames = Sequence[memoryview]
Outcome = AnyReply | str

T = TypeVar("T")


class Ring(Generic[T]):
    """The last entries, numbered from the first one ever, so that a reader sees how many it missed."""

    def __init__(self, limit: int) -> None:
        self._entries: collections.deque[T] = collections.deque(maxlen=limit)
        self.next = 0

    def add(self, entry: T) -> None:
        """Append; the oldest goes when the ring is full."""
        self._entries.append(entry)
        self.next += 1

    def since(self, number: int, limit: int) -> tuple[list[T], int, int]:
        """Entries from `number` on: (entries, number to ask for next, how many are gone). Too many: the newest."""
        first = self.next - len(self._entries)
        begin = max(number, first, self.next - limit)
        if begin >= self.next:
            return [], self.next, 0
        # From the end: a deque is slow to index in its middle, and a reader wants the newest.
        newest = itertools.islice(reversed(self._entries), self.next - begin)
        return list(newest)[::-1], self.next, begin - max(0, number)


class Noted(NamedTuple):
    """A request as it is kept: made into words only when somebody reads it, for most are never read."""

    end_ns: int
    duration_ns: int
    session: Session
    request: AnyRequest
    blocks: int
    outcome: Outcome


Happened = Noted | Entry


class RequestLog:
    """Observes one endpoint's requests (protocol.service.Observer). All on the loop."""

    def __init__(self, clock: Clock, slow_ms: int) -> None:
        self.slow_ms = slow_ms
        self.slow: Ring[Happened] = Ring(SLOW_ENTRIES)
        self.watched: Ring[Happened] = Ring(WATCHED_ENTRIES)
        self._clock = clock
        self._seconds: dict[type, Histogram] = {}
        self._asked_tokens = 0
        self._hit_tokens = dict.fromkeys(_TIER_OF_BIT.values(), 0)
        self._watching_until_ns = -1

    def __call__(self, session: Session, request: AnyRequest, frames: Frames, begin_ns: int, outcome: Outcome) -> None:
        """Take note of one request."""
        now_ns = self._clock.now_ns()
        duration_ns = now_ns - begin_ns
        kind = type(request)
        histogram = self._seconds.get(kind)
        if histogram is None:
            histogram = self._seconds[kind] = Histogram(BOUNDS_S)
        histogram.add(duration_ns)
        if type(outcome) is LookupReply:
            self._found(session, request, frames, outcome)  # type: ignore[arg-type]
        is_slow = duration_ns >= self.slow_ms * 1_000_000
        if is_slow or now_ns < self._watching_until_ns:
            blocks = frames[0].nbytes // _KEY_BYTES if frames and kind is not Commit else 0
            noted = Noted(now_ns, duration_ns, session, request, blocks, outcome)
            if is_slow:
                self.slow.add(noted)
            if now_ns < self._watching_until_ns:
                self.watched.add(noted)

    @property
    def seconds(self) -> dict[str, Histogram]:
        """How long requests took, by operation."""
        return {_operation(kind): histogram for kind, histogram in self._seconds.items()}

    def slow_since(self, number: int) -> tuple[list[Entry], int, int]:
        """Slow requests from `number` on, as Ring.since."""
        return self._read(self.slow, number, SLOW_ENTRIES)

    def watch(self, number: int) -> tuple[list[Entry], int, int]:
        """What happened since `number` (-1: from now on), and have it recorded for a while."""
        self._watching_until_ns = self._clock.now_ns() + WATCHER_PATIENCE_NS
        return self._read(self.watched, self.watched.next if number < 0 else number, WATCH_PAGE_ENTRIES)

    def _read(self, ring: Ring[Happened], number: int, limit: int) -> tuple[list[Entry], int, int]:
        entries, following, skipped = ring.since(number, limit)
        now_ns, now = self._clock.now_ns(), dt.datetime.now(dt.UTC)
        return [_in_words(entry, now_ns, now) for entry in entries], following, skipped

    @property
    def is_watched(self) -> bool:
        """Whether somebody wants to know what happens."""
        return self._clock.now_ns() < self._watching_until_ns

    def statistics(self) -> Mapping[str, int]:
        """Tokens looked up and found, by name (rows of kvtierd.telemetry.metrics)."""
        return {
            "lookup_tokens": self._asked_tokens,
            **{f"hit_{tier}_tokens": count for tier, count in self._hit_tokens.items()},
        }

    def _found(self, session: Session, request: Lookup, frames: Frames, reply: LookupReply) -> None:
        tokens = namespace_of(session, request.namespaces[0]).geometry.block_size
        self._asked_tokens += frames[0].nbytes // _KEY_BYTES * tokens
        if not reply.hit:
            return
        fastest = reply.tiers.translate(_FASTEST)
        left = reply.hit
        for bit, tier in _TIER_OF_BIT.items():
            if count := fastest.count(bit):
                self._hit_tokens[tier] += count * tokens
                left -= count
                if not left:
                    return


class WatchedEvents:
    """Passes events of blocks on, and notes them for a watcher (tiers.copies.EventSink)."""

    def __init__(self, sink: EventSink, requests: RequestLog) -> None:
        self._sink = sink
        self._requests = requests

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
        self._requests.watched.add(entry)


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
