"""How encoding and decoding are cut into jobs for threads, and that nobody is left behind in them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from kvtierd.tiers import compress_work
from kvtierd.tiers.compress_work import PIECE_BYTES, in_pieces, pieces, strings
from kvtierd.tiers.workers import Workers

Layers = dict[int, list[int]]


def done_in(layers: int, layer_bytes: int, blocks: int, run: Callable[..., object]) -> Layers:
    """The order in which the layers of each block were done."""
    seen: Layers = {block: [] for block in range(blocks)}

    def work(block: int, first: int, end: int) -> None:
        seen[block] += range(first, end)

    asyncio.run(in_pieces(run, work, layers, layer_bytes, blocks))  # type: ignore[arg-type]
    return seen


@pytest.fixture
def workers() -> Workers:
    pool = Workers(4)
    yield pool
    pool.close()


@pytest.mark.parametrize("layer_bytes", [PIECE_BYTES // 64, PIECE_BYTES // 4, PIECE_BYTES // 3, 2 * PIECE_BYTES])
@pytest.mark.parametrize(("layers", "blocks"), [(1, 1), (2, 9), (7, 5), (33, 3), (2, 0)])
def test_every_layer_of_every_block_is_done_once_and_in_order(
    workers: Workers, layers: int, layer_bytes: int, blocks: int
) -> None:
    seen = done_in(layers, layer_bytes, blocks, workers.run)
    assert seen == {block: list(range(layers)) for block in range(blocks)}


@pytest.mark.parametrize("layers", [1, 2, 5, 9, 32])
def test_jobs_about_the_same_block_are_of_one_string(layers: int) -> None:
    met: dict[int, int] = {}
    for number, string in enumerate(strings(pieces(layers, PIECE_BYTES // 4, 11))):
        for job in string:
            for block, _, _ in job:
                assert met.setdefault(block, number) == number
    assert sorted(met) == list(range(11))


def test_two_jobs_are_with_the_threads_and_no_more(workers: Workers) -> None:
    both, inside, most, lock = threading.Barrier(compress_work.AT_ONCE), 0, 0, threading.Lock()

    def work(_block: int, _first: int, _end: int) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        both.wait(60)
        with lock:
            inside -= 1

    asyncio.run(in_pieces(workers.run, work, 1, PIECE_BYTES, 4 * compress_work.AT_ONCE))
    assert most == compress_work.AT_ONCE


def test_a_job_that_fails_is_raised_when_the_other_has_ended(workers: Workers) -> None:
    failing, ended = threading.Event(), threading.Event()

    def work(block: int, _first: int, _end: int) -> None:
        if block == 0:
            failing.set()
            raise ValueError("a bug")
        failing.wait(60)
        ended.set()

    async def main() -> None:
        with pytest.raises(ValueError, match="a bug"):
            await in_pieces(workers.run, work, 1, PIECE_BYTES, 2)
        assert ended.is_set()

    asyncio.run(main())


def test_who_is_cancelled_waits_for_the_jobs_under_way(workers: Workers) -> None:
    begun, go_on, ended = threading.Barrier(compress_work.AT_ONCE + 1), threading.Event(), []

    def work(block: int, _first: int, _end: int) -> None:
        begun.wait(60)
        go_on.wait(60)
        ended.append(block)

    async def main() -> None:
        task = asyncio.create_task(in_pieces(workers.run, work, 1, PIECE_BYTES, 9))
        await asyncio.to_thread(begun.wait, 60)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sorted(ended) == [0, 1]

    asyncio.run(main())
