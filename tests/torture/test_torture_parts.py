"""Each part of the torture in its small form, and what it must find where something is wrong."""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zmq

from kvtierd.protocol.messages import Flush, Stats
from kvtierd.testing.memory_disk import MemoryFile
from kvtierd.testing.raw_client import RawClient
from tests.torture import faults, stalls, suites
from tests.torture.__main__ import PARTS
from tests.torture.cycles import holders, shared_files
from tests.torture.driver import run_unit
from tests.torture.logs import complaints
from tests.torture.parts import Unit
from tests.torture.promises import Promises
from tests.torture.prompts import content_of, keys_of, wrong_blocks

ROOT = Path(__file__).parents[2]
RUN = [name for name, part in PARTS.items() if part.small]


@pytest.mark.parametrize("name", RUN)
def test_case_10_case_19_case_30_a_small_run_finds_nothing(tmp_path: Path, name: str) -> None:
    part = PARTS[name]
    findings = run_unit(part, Unit(name, 0, part.small, 1, tmp_path))
    assert not findings, "\n".join(findings)


def test_a_request_that_nobody_answers_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "LATE_S", 0.5)
    endpoint = f"ipc://{tmp_path}/s"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as deaf, RawClient(endpoint) as raw:
        deaf.setsockopt(zmq.LINGER, 0)
        deaf.bind(endpoint)
        findings = list(stalls.ask_all(raw, random.Random(1), [(Flush(id=0), []), (Stats(id=0), [])]))
    assert [finding.split()[0] for finding in findings] == ["Flush", "Stats"]


def test_every_marked_test_is_in_a_suite() -> None:
    word = "mark." + "torture"
    marked = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py") if word in path.read_text()}
    assert len(marked) > 2
    assert not [path for path in marked if not path.startswith(suites.FOLDERS)]


def test_a_disk_that_does_not_keep_what_it_says_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryFile, "sync", lambda _: None)
    found = faults.one_fault(tmp_path, 10_000, faults.FAULTS["fails"], 1)
    assert any("flushed prompts are not whole" in finding for finding in found), found


def test_bytes_that_changed_on_their_way_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "pattern", lambda key, _: np.roll(key, 1))
    found = faults.one_fault(tmp_path, 10_000, faults.FAULTS["fails"], 1)
    assert any("was served with other bytes" in finding for finding in found), found


class Holding:
    """A client that finds what it is told to."""

    def __init__(self, counts: dict[int, int], damage: int = -1) -> None:
        self.counts, self.damage = counts, damage
        self.order = iter(sorted(counts))

    def register(self, _: object) -> None:
        return None

    def fetch(self, _: object, keys: np.ndarray) -> SimpleNamespace:
        prompt = next(self.order)
        blocks = content_of(keys[: self.counts[prompt]])
        if prompt == self.damage:
            blocks[1, 100] ^= 4
        return SimpleNamespace(count=self.counts[prompt], blocks=blocks)


def promised(*lines: str) -> Promises:
    promises = Promises()
    for line in lines:
        promises.take(line)
    return promises


def test_promises_that_are_broken_are_found() -> None:
    facts = ("begun 1 4", "begun 2 3", "begun 3 5", "flushed 1:4 2:3", "doomed 2", "deleted 2")
    assert not list(promised(*facts).check(Holding({1: 4, 2: 0, 3: 2})))
    assert "4 blocks were flushed and 3 are there" in next(promised(*facts).check(Holding({1: 3, 2: 0, 3: 0})))
    assert "deleted ones came back" in next(promised(*facts).check(Holding({1: 4, 2: 1, 3: 0})))
    assert "block 1 has other bytes" in next(promised(*facts).check(Holding({1: 4, 2: 0, 3: 0}, damage=1)))
    assert "with other bytes under load" in next(promised("wrong 7 2").check(Holding({})))


def test_what_is_not_found_once_must_never_come_back() -> None:
    promises = promised("begun 1 4")
    assert not list(promises.check(Holding({1: 2})))
    assert "3 blocks are there and 2 can be" in next(promises.check(Holding({1: 3})))


def test_wrong_bytes_are_named() -> None:
    keys = keys_of(3, 4)
    blocks = content_of(keys)
    assert wrong_blocks(blocks, keys) == []
    blocks[2, -1] ^= 1
    assert wrong_blocks(blocks[[1, 0, 2, 3]], keys) == [0, 1, 2]


def test_shared_memory_that_somebody_still_holds_is_found() -> None:
    others = shared_files(os.getpid())
    descriptor = os.memfd_create("torture")
    files = shared_files(os.getpid()) - others
    assert holders(files) == {os.getpid()}
    os.close(descriptor)
    assert not holders(files)


def test_complaints_of_a_daemon_are_found_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("1:2 INFO x: ERROR codes\n1:2 ERROR x: block 7 broke\n1:3 ERROR x: block 8 broke\nTraceback\n")
    assert len(list(complaints(log))) == 2
