"""What is noted of requests: times, tokens, slow ones, and a stream that says what it skipped."""

from __future__ import annotations

import pytest

from kvtierd.core.clock import ManualClock
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.daemon.requests import WATCHED_BETWEEN, WATCHER_PATIENCE_NS, RequestLog, Ring, WatchedEvents
from kvtierd.protocol.messages import Flush, Get, Lookup, LookupReply, OkReply
from kvtierd.protocol.service import Session
from kvtierd.tiers.namespaces import NamespaceTable
from kvtierd.tiers.sessions import SessionState, state_of


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def log(clock: ManualClock) -> RequestLog:
    return RequestLog(clock, slow_ms=100)


@pytest.fixture
def session() -> Session:
    found = Session(1, "default", "engine-7", b"t" * 16, state=SessionState(), pid=42)
    space = Namespace(model="m", geometry=Geometry(block_size=16, layers=2, kv_heads=2, k_dim=64, v_dim=64))
    state_of(found).number_of(NamespaceTable().register("default", space, allow_loss=False))
    return found


def _keys(count: int) -> list[memoryview]:
    return [memoryview(bytes(32 * count))]


def test_tokens_are_counted_at_the_fastest_tier_that_has_them(log: RequestLog, session: Session) -> None:
    # gpu and host; host alone; host and nvme; nvme alone; and two that were not found.
    reply = LookupReply(id=1, hit=5, tiers=bytes([3, 2, 6, 4, 4]))
    log(session, Lookup(id=1, namespaces=[1]), _keys(7), 1, reply)
    log(session, Lookup(id=1, namespaces=[1]), _keys(2), 1, LookupReply(id=1, hit=0))
    assert log.statistics() == {
        "lookup_tokens": 9 * 16, "hit_gpu_tokens": 16, "hit_host_tokens": 32, "hit_nvme_tokens": 32,
    }  # fmt: skip


def test_times_are_counted_by_operation(log: RequestLog, clock: ManualClock, session: Session) -> None:
    for duration_s in (0.0002, 0.0002, 0.02):
        begin_ns = clock.now_ns()
        clock.advance(duration_s)
        log(session, Flush(id=1), (), begin_ns, OkReply(id=1))
    log(session, Get(id=1, namespace=1), _keys(1), clock.now_ns(), "busy")
    assert log.seconds["flush"].count == 3
    assert log.seconds["flush"].sum_ns == pytest.approx(20_400_000, abs=10)
    assert log.seconds["get"].count == 1


def test_slow_requests_are_kept_with_who_asked_for_what(log: RequestLog, clock: ManualClock, session: Session) -> None:
    begin_ns = clock.now_ns()
    clock.advance(0.0999)
    log(session, Get(id=1, namespace=1), _keys(3), begin_ns, OkReply(id=1))
    assert log.slow_since(0) == ([], 0, 0)
    clock.advance(0.0002)
    log(session, Get(id=1, namespace=1), _keys(3), begin_ns, "deadline")
    (entry,), following, skipped = log.slow_since(0)
    assert (following, skipped) == (1, 0)
    assert entry.pop("time")
    assert entry.pop("ms") == pytest.approx(100.1, abs=0.01)
    assert entry == {
        "what": "get", "client": "engine-7", "pid": 42, "namespace": "m", "blocks": 3, "outcome": "deadline",
    }  # fmt: skip


def test_ring_says_how_many_are_gone() -> None:
    ring: Ring[dict] = Ring(4)
    for number in range(10):
        ring.add({"n": number})
    entries, following, skipped = ring.since(3, 99)
    assert ([entry["n"] for entry in entries], following, skipped) == ([6, 7, 8, 9], 10, 3)
    assert ring.since(8, 99) == ([{"n": 8}, {"n": 9}], 10, 0)
    assert ring.since(10, 99) == ([], 10, 0)
    assert ring.since(11, 99) == ([], 10, 0)
    entries, following, skipped = ring.since(6, limit=2)
    assert ([entry["n"] for entry in entries], skipped) == ([8, 9], 2)


def test_nothing_is_recorded_unless_somebody_watches(log: RequestLog, clock: ManualClock, session: Session) -> None:
    class Sink:
        passed = 0

        def stored(self, *_words) -> None:
            self.passed += 1

        removed = stored

    sink = Sink()
    events = WatchedEvents(sink, log)

    def happen() -> None:
        log(session, Flush(id=1), (), clock.now_ns(), OkReply(id=1))
        events.stored([b"\xab" * 32, b"\xcd" * 32], None, 16, "host")
        events.removed([b"\xab" * 32], "host")

    happen()
    assert log.watch(-1) == ([], 0, 0)
    happen()
    entries, following, skipped = log.watch(0)
    assert ([entry["what"] for entry in entries], following, skipped) == (["flush", "stored", "removed"], 3, 0)
    assert (entries[1]["blocks"], entries[1]["first_key"], entries[1]["tier"]) == (2, "ab" * 8, "host")
    clock.advance(WATCHER_PATIENCE_NS / 1e9 + 1)
    happen()
    assert log.watch(following) == ([], 3, 0)
    assert sink.passed == 6


def test_watcher_learns_what_was_not_kept_for_it(log: RequestLog, clock: ManualClock, session: Session) -> None:
    _, following, _ = log.watch(-1)
    for _ in range(WATCHED_BETWEEN + 500):
        log(session, Flush(id=1), (), clock.now_ns(), OkReply(id=1))
    entries, following, skipped = log.watch(following)
    assert (len(entries), skipped, following) == (WATCHED_BETWEEN, 500, WATCHED_BETWEEN + 500)
    log(session, Flush(id=1), (), clock.now_ns(), OkReply(id=1))
    entries, following, skipped = log.watch(following)
    assert (len(entries), skipped) == (1, 0)


def test_ring_counts_what_is_not_kept() -> None:
    ring: Ring[str] = Ring(8)
    ring.add("a")
    ring.skip()
    ring.skip()
    ring.add("b")
    assert ring.since(0, 99) == (["a", "b"], 4, 2)
    assert ring.since(1, 99) == (["b"], 4, 2)
    assert ring.since(4, 99) == ([], 4, 0)
