"""Kill the process under mixed load, again and again: what was flushed is back, and nothing that was deleted.

A killed process leaves the page cache behind, so this proves nothing about power; it proves that every state between
two system calls is one that a start understands.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtierd.storage.checker import Verdict, check_store
from tests.fault.storage.killed_process import FIELDS
from tests.unit.storage.blocks import ON_A_MODEL, Block, by_key, forget_index, opened, readable, run

pytestmark = ON_A_MODEL
ROUND_NUMBERS = 100_000


class Promises:
    """What the killed processes said."""

    def __init__(self) -> None:
        self.must: set[int] = set()
        self.may: set[int] = set()

    def take(self, line: str) -> None:
        what, *words = line.split()
        numbers = set(map(int, words))
        match what:
            case "flushed":
                self.must |= numbers
            case "begun":
                self.may |= numbers
            case "doomed":
                self.must -= numbers
            case "deleted":
                self.may -= numbers
            case "open":
                pass
            case _:
                raise AssertionError(line)

    def settle(self, found: set[int]) -> None:
        """A start has found these; what it has found is there, what it has not found never comes back."""
        self.may = set(found)
        self.must &= found


def killed_life(folder: Path, promises: Promises, seed: int, number: int, rng: random.Random) -> None:
    """Let a process work for a while, kill it at any moment, and take in what it said."""
    log = folder.with_name(folder.name + ".log")
    command = [sys.executable, "-m", "tests.fault.storage.killed_process", str(folder), str(seed), str(number)]
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.PIPE)
        assert child.stdin is not None
        assert child.stderr is not None
        child.stdin.write(" ".join(map(str, sorted(promises.may))).encode())
        child.stdin.close()
        while not log.stat().st_size and child.poll() is None:
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.35))
        child.send_signal(signal.SIGKILL)
        child.wait()
        errors = child.stderr.read().decode()
        child.stderr.close()
    assert child.returncode == -signal.SIGKILL, errors
    for line in log.read_text().splitlines():
        promises.take(line)
    log.unlink()


async def inspected(folder: Path, promises: Promises, seed: int) -> None:
    """Check offline, then start: index and scan must agree, and keep every promise."""
    report = await check_store(folder, verify_data=True)
    assert report.verdict is Verdict.CLEAN, (seed, report.findings)
    async with opened(folder, **FIELDS) as (store, recovered):
        held = by_key(recovered)
        found = set()
        for number in promises.may | promises.must:
            block = Block(number)
            if (extent := held.get(block.digest + block.key)) is not None:
                assert await readable(store, block, extent), (seed, number)
                found.add(number)
    assert promises.must <= found, (seed, "flushed and gone", promises.must - found)
    assert len(held) == len(found), (seed, "found and never stored, or deleted", len(held) - len(found))
    report = await check_store(folder, verify_data=True)
    assert report.verdict is Verdict.CLEAN, (seed, report.findings)
    assert report.live_blocks == len(found)
    promises.settle(found)


def rounds(folder: Path, count: int, seed: int) -> None:
    promises, rng = Promises(), random.Random(seed)
    flushed = 0
    for number in range(count):
        killed_life(folder, promises, seed + number, (number + 1) * ROUND_NUMBERS, rng)
        flushed += len(promises.must)
        if number % 4 == 3:
            forget_index(folder)  # a start that has to scan must find just the same

        async def inspect() -> None:
            await inspected(folder, promises, seed)

        run(inspect)
    assert flushed, "the load never got as far as a flush"


def test_case_10_case_32_killed_ten_times_under_load_keeps_every_promise(folder: Path) -> None:
    rounds(folder, 10, seed=int(os.environ.get("KVTIERD_SEED", "1")))


@pytest.mark.torture
@pytest.mark.timeout(1200)
def test_case_10_case_32_killed_a_hundred_times_under_load_keeps_every_promise(folder: Path) -> None:
    rounds(folder, 100, seed=int(os.environ.get("KVTIERD_SEED", "1000")))
