"""Blocks between an engine's pages and a daemon: against the real client and server, with a service to break."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvtierd import Client, Geometry
from kvtierd.connectors import vllm_transfers
from kvtierd.connectors.vllm_keys import RequestKeys
from kvtierd.connectors.vllm_lookups import Lookup, Lookups, Question
from kvtierd.connectors.vllm_pages import EnginePages
from kvtierd.connectors.vllm_plan import ModelFacts, Plan, RankShape, Transfer, namespace_of
from kvtierd.connectors.vllm_transfers import Saved, Transfers
from kvtierd.connectors.vllm_worker import WorkerSide
from kvtierd.testing.fake_daemon import ThreadDaemon
from kvtierd.testing.fake_service import FakeService
from kvtierd.testing.waiting import wait_for

SHAPE = Geometry(block_size=4, layers=3, kv_heads=2, k_dim=8, v_dim=4, layout="opaque:test")
FACTS = ModelFacts(model="m", revision="r")
RANKS = [RankShape(geometry=SHAPE, tp_rank=rank, tp_size=2) for rank in range(2)]
BLOCKS, PAGES = 7, 20
TOKENS = list(range(BLOCKS * 4))


@pytest.fixture
def service() -> FakeService:
    return FakeService(slot_bytes=SHAPE.slot_bytes)


@pytest.fixture
def daemon(service: FakeService) -> Iterator[ThreadDaemon]:
    with tempfile.TemporaryDirectory(prefix="kvt-") as folder, ThreadDaemon(Path(folder), service) as running:
        yield running


class Rank:
    """One worker: its cache, and transfers between it and the daemon."""

    def __init__(self, client: Client, shape: RankShape, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.layers = [rng.integers(0, 256, (PAGES, SHAPE.layer_bytes), np.uint8) for _ in range(SHAPE.layers)]
        self.transfers = Transfers(client, shape, EnginePages(SHAPE, self.layers), load_timeout_s=20, save_timeout_s=20)

    def block(self, page: int) -> bytes:
        return b"".join(layer[page].tobytes() for layer in self.layers)


@pytest.fixture
def client(daemon: ThreadDaemon) -> Iterator[Client]:
    with Client(daemon.endpoint, timeout_s=20) as connected:
        yield connected


@pytest.fixture
def ranks(client: Client) -> list[Rank]:
    return [Rank(client, shape, seed) for seed, shape in enumerate(RANKS)]


def keys() -> RequestKeys:
    made = RequestKeys([namespace_of(FACTS, shape).digest() for shape in RANKS], 4)
    made.grow(TOKENS, BLOCKS)
    return made


def transfer(begin: int, end: int, pages: tuple[int, ...], name: str = "r", number: int = 0) -> Transfer:
    made = keys()
    return Transfer(name, FACTS, made.keys(begin, end), made.parents(begin), pages, number)


def never() -> bool:
    return False


def test_blocks_saved_from_pages_are_loaded_into_other_pages(ranks, monkeypatch):
    monkeypatch.setattr(vllm_transfers, "BATCH_BYTES", 2 * SHAPE.slot_bytes)
    for rank in ranks:
        rank.transfers = Transfers(
            rank.transfers._client,
            rank.transfers._shape,
            rank.transfers._pages,
            load_timeout_s=20,
            save_timeout_s=20,
        )
        expected = [rank.block(page) for page in range(7)]
        assert rank.transfers.save(transfer(0, 3, (0, 1, 2)), never).stored == 3
        assert rank.transfers.save(transfer(3, 7, (3, 4, 5, 6)), never).stored == 4
        assert rank.transfers.load(transfer(0, 7, (19, 8, 17, 10, 15, 12, 13))) == 7
        assert [rank.block(page) for page in (19, 8, 17, 10, 15, 12, 13)] == expected


def test_ranks_have_blocks_of_their_own(ranks):
    for rank in ranks:
        rank.transfers.save(transfer(0, 1, (0,)), never)
    expected = [rank.block(0) for rank in ranks]
    for rank in ranks:
        assert rank.transfers.load(transfer(0, 1, (9,))) == 1
    assert [rank.block(9) for rank in ranks] == expected
    assert expected[0] != expected[1]


def ask(client: Client, blocks: int = BLOCKS, shapes=RANKS, timeout_s: float = 5) -> int:
    lookups = Lookups(client, shapes, timeout_s)
    try:
        lookup = lookups.begin(Question(lambda: FACTS, TOKENS, blocks))
        wait_for(lambda: not lookup.pending)
        found = lookup.found()
        return found.blocks if found else -1
    finally:
        lookups.close()


def test_case_23_ranks_agree_on_what_all_of_them_have(client, ranks):
    ranks[0].transfers.save(transfer(0, 5, (0, 1, 2, 3, 4)), never)
    assert ask(client) == 0
    ranks[1].transfers.save(transfer(0, 3, (0, 1, 2)), never)
    assert ask(client) == 3
    assert ask(client, shapes=RANKS[:1]) == 5
    assert ask(client, blocks=2) == 2


def test_a_hole_ends_a_load(ranks):
    rank = ranks[0]
    rank.transfers.save(transfer(0, 2, (0, 1)), never)
    rank.transfers.save(transfer(3, 4, (3,)), never)
    assert rank.transfers.load(transfer(0, 4, (10, 11, 12, 13))) == 2


def test_case_03_a_block_that_is_damaged_is_not_loaded_and_deleted(client, ranks, monkeypatch):
    rank = ranks[0]
    rank.transfers.save(transfer(0, 4, (0, 1, 2, 3)), never)
    real, asked = EnginePages._load, []

    def damaged(self, page, slot, sums):
        asked.append(page)
        return real(self, page, slot, sums) and len(asked) != 3

    monkeypatch.setattr(EnginePages, "_load", damaged)
    assert rank.transfers.load(transfer(0, 4, (10, 11, 12, 13))) == 2
    assert ask(client, shapes=RANKS[:1]) == 2


def test_a_save_given_up_in_its_midst_stores_nothing_of_that_batch(client, ranks):
    answers = iter([False, True])
    assert ranks[0].transfers.save(transfer(0, 4, (0, 1, 2, 3)), lambda: next(answers)).stored == 0
    assert ask(client, shapes=RANKS[:1]) == 0


def test_a_save_tells_how_many_leading_blocks_are_there_whoever_stored_them(ranks):
    rank = ranks[0]
    assert rank.transfers.save(transfer(1, 2, (1,)), never) == Saved(1, 1)
    assert rank.transfers.save(transfer(0, 4, (0, 1, 2, 3), number=7), never) == Saved(3, 4)
    assert rank.transfers.save(transfer(0, 4, (0, 1, 2, 3), number=8), never) == Saved(0, 4)


def test_a_block_that_was_refused_ends_the_leading_ones(ranks, service):
    while len(service.chunk.free) > 2:
        service.chunk.take()
    assert ranks[0].transfers.save(transfer(0, 4, (0, 1, 2, 3), number=7), never) == Saved(2, 2)


def test_without_a_daemon_lookups_miss_and_transfers_move_nothing(tmp_path):
    with Client(f"ipc://{tmp_path}/none.sock", timeout_s=0.05) as client:
        assert ask(client, timeout_s=0.2) == 0
        rank = Rank(client, RANKS[0], 1)
        assert rank.transfers.save(transfer(0, 2, (0, 1)), never).stored == 0
        assert rank.transfers.load(transfer(0, 2, (0, 1))) == 0


def test_a_lookup_that_raises_costs_its_request_the_cache_and_nothing_else(client):
    lookups = Lookups(client, RANKS, 20)

    def broken() -> ModelFacts:
        raise ValueError("no such adapter")

    lookup = lookups.begin(Question(broken, TOKENS, BLOCKS))
    wait_for(lambda: not lookup.pending)
    assert lookup.found() is None
    lookups.close()


def test_a_lookup_is_pending_no_longer_than_its_deadline():
    never_done: Future = Future()
    assert Lookup(never_done, float("inf"), 0.0).pending
    assert not Lookup(never_done, 0.0, 0.0).pending
    assert Lookup(never_done, 0.0, 0.0).found() is None


def test_a_lookup_is_awaited_for_a_moment_and_not_longer():
    never_done: Future = Future()
    lookup = Lookup(never_done, float("inf"), time.monotonic())
    lookup.wait()
    lookup.wait()
    assert lookup.pending
    assert not never_done.cancelled()


class SlowTransfers:
    """Loads and saves that wait for the test."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.loaded, self.stored = 1, []

    def fence(self):
        return None

    def close(self):
        pass

    def load(self, _transfer, _fence):
        assert self.gate.wait(60)
        return self.loaded

    def save(self, transfer, cancelled, _fence):
        assert self.gate.wait(60)
        if cancelled():
            return Saved(0, 0)
        self.stored.append(transfer.request_id)
        return Saved(len(transfer.pages), len(transfer.pages))


@pytest.fixture
def slow() -> SlowTransfers:
    return SlowTransfers()


@pytest.fixture
def worker(slow) -> Iterator[WorkerSide]:
    with ExitStack() as stack:
        side = WorkerSide(slow, patience_s=30)
        stack.callback(side.close)
        stack.callback(slow.gate.set)
        yield side


def test_a_failed_load_is_reported_with_its_request(worker, slow):
    worker.load(Plan(loads=[transfer(0, 3, (4, 5, 6))]))
    assert worker.results() == (set(), set())
    slow.gate.set()
    received: set[str] = set()
    wait_for(lambda: bool(received.update(worker.results()[1]) or received))
    assert received == {"r"}
    assert worker.failed_pages() == {5, 6}
    assert worker.failed_pages() == set()


def test_a_step_that_computes_nothing_waits_for_the_first_copy_to_end(worker, slow):
    assert worker.results(30) == (set(), set())  # nothing is under way
    worker.load(Plan(loads=[transfer(0, 1, (4,))]))
    assert worker.results(0.01) == (set(), set())
    opener = threading.Timer(0.05, slow.gate.set)
    opener.start()
    assert worker.results(30) == (set(), {"r"})
    opener.join()
    slow.gate.clear()
    worker.save(Plan(saves=[transfer(0, 2, (1, 2))]))
    worker.load(Plan(finished={"r"}))
    opener = threading.Timer(0.05, slow.gate.set)
    opener.start()
    assert worker.results(30) == ({"r"}, set())
    opener.join()


def test_pages_of_a_request_that_ended_go_when_they_are_read(worker, slow):
    worker.save(Plan(saves=[transfer(0, 2, (1, 2))]))
    worker.load(Plan(finished={"r"}))
    assert worker.results() == (set(), set())
    slow.gate.set()
    sent: set[str] = set()
    wait_for(lambda: bool(sent.update(worker.results()[0]) or sent))
    assert sent == {"r"}
    assert worker.results() == (set(), set())
    assert worker.counts["saved"] == 2


def test_saves_with_a_number_are_told_once(worker, slow):
    slow.gate.set()
    worker.save(Plan(saves=[transfer(0, 2, (1, 2), number=3), transfer(2, 3, (3,))]))
    wait_for(lambda: worker.counts["saved"] == 3)
    assert worker.saves() == {3: [2]}
    assert worker.saves() == {}


def test_saves_of_a_preempted_request_are_given_up(worker, slow):
    worker.save(Plan(saves=[transfer(0, 2, (1, 2)), transfer(2, 3, (3,)), transfer(0, 1, (9,), "other")]))
    worker.preempt(Plan(preempted={"r"}))
    slow.gate.set()
    wait_for(lambda: worker.counts["saved"] + worker.counts["unsaved"] == 4)
    assert slow.stored == ["other"]


def test_a_save_that_waited_too_long_is_dropped(slow):
    side = WorkerSide(slow, patience_s=0)
    slow.gate.set()
    side.save(Plan(saves=[transfer(0, 2, (1, 2))]))
    wait_for(lambda: side.counts["unsaved"] == 2)
    assert slow.stored == []
    side.close()


def test_a_transfer_that_raises_is_a_failed_one(worker, slow):
    slow.load = lambda _transfer, _fence: 1 // 0
    worker.load(Plan(loads=[transfer(0, 2, (1, 2))]))
    received: set[str] = set()
    wait_for(lambda: bool(received.update(worker.results()[1]) or received))
    assert worker.failed_pages() == {1, 2}
