"""Pieces of attention take turns; small ones of similar length, of several requests, run side by side."""

from __future__ import annotations

import asyncio
import collections
import threading
from collections.abc import Callable

import pytest

from kvtierd.core.progress import Progress
from kvtierd.tiers.attend_turns import Turns


class Rig:
    """Turns on `threads` threads; `ran` has the names of pieces as they begin, and `most` how many ran at once."""

    def __init__(self, threads: int) -> None:
        self.counters: collections.Counter[str] = collections.Counter()
        self.turns = Turns(threads, Progress(), self.counters)
        self.ran: list[str] = []
        self.most = 0
        self._running = 0
        self._lock = threading.Lock()

    def piece(self, name: str, until: threading.Event | None = None) -> Callable[[], str]:
        """A piece that runs until the event is set."""

        def run() -> str:
            with self._lock:
                self.ran.append(name)
                self._running += 1
                self.most = max(self.most, self._running)
            if until is not None:
                assert until.wait(20)
            with self._lock:
                self._running -= 1
            return name

        return run

    async def held(self) -> tuple[asyncio.Task[str], threading.Event]:
        """A large piece that runs until the event is set: what is asked for meanwhile waits."""
        event = threading.Event()
        task = asyncio.create_task(self.turns.run(self.piece("first", event)))
        while not self.ran:
            await asyncio.sleep(0.001)
        return task, event


async def batch_of(rig: Rig, works: list[int]) -> None:
    """Ask for pieces of so much work while another runs, and wait for all of them."""
    first, event = await rig.held()
    both = [threading.Event() for _ in works]
    tasks = [asyncio.create_task(rig.turns.run(rig.piece(str(i), both[i]), work)) for i, work in enumerate(works)]
    await asyncio.sleep(0)
    event.set()
    assert await first == "first"
    for one in both:
        await asyncio.sleep(0.02)
        one.set()
    assert await asyncio.gather(*tasks) == [str(i) for i in range(len(works))]


@pytest.mark.parametrize(
    ("threads", "works", "batches", "pieces", "most"),
    [
        (2, [100, 120], 1, 2, 2),  # similar: side by side
        (2, [100, 300], 0, 0, 1),  # one is much longer
        (2, [0, 0], 0, 0, 1),  # each uses all processors
        (2, [100, 0, 120], 1, 2, 2),  # the large one between them does not hold up the second
        (2, [100, 100, 100], 1, 2, 2),  # no more than there are threads
        (1, [100, 100], 0, 0, 1),
    ],
)
def test_small_pieces_of_similar_length_run_side_by_side(
    threads: int, works: list[int], batches: int, pieces: int, most: int
) -> None:
    rig = Rig(threads)

    asyncio.run(batch_of(rig, works))
    rig.turns.close()
    assert (rig.counters["attend_batches"], rig.counters["attend_batched_pieces"]) == (batches, pieces)
    assert rig.most == most
    assert len(rig.ran) == len(works) + 1


def test_who_is_cancelled_before_his_turn_never_runs_and_who_has_begun_is_waited_for() -> None:
    async def scenario(rig: Rig) -> None:
        first, event = await rig.held()
        waiting, other = (asyncio.create_task(rig.turns.run(rig.piece(name), 5)) for name in ("gone", "other"))
        await asyncio.sleep(0)
        waiting.cancel()
        first.cancel()
        await asyncio.sleep(0.01)
        assert waiting.cancelled()
        assert not first.done()
        event.set()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await other == "other"
        assert rig.ran == ["first", "other"]

    rig = Rig(2)
    asyncio.run(scenario(rig))
    rig.turns.close()


def test_an_error_of_a_piece_is_its_own() -> None:
    def fail() -> None:
        raise ValueError("this piece")

    async def scenario(rig: Rig) -> None:
        with pytest.raises(ValueError, match="this piece"):
            await rig.turns.run(fail)
        first, event = await rig.held()
        bad, good = asyncio.create_task(rig.turns.run(fail, 5)), asyncio.create_task(rig.turns.run(rig.piece("b"), 5))
        await asyncio.sleep(0)
        event.set()
        with pytest.raises(ValueError, match="this piece"):
            await bad
        assert (await good, await first) == ("b", "first")
        assert await rig.turns.run(rig.piece("c")) == "c"

    rig = Rig(2)
    asyncio.run(scenario(rig))
    rig.turns.close()
