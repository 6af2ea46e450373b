"""Threads with less priority than others, and systems that do not let them have it."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from kvtierd.tiers.workers import Workers


def _priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def _asked_of(workers: Workers) -> int:
    try:
        return asyncio.run(workers.run(_priority))
    finally:
        workers.close()


def test_threads_are_nicer_than_the_one_that_made_them_and_it_stays_as_it_was() -> None:
    before = _priority()
    assert _asked_of(Workers(1, niceness=3)) == min(19, before + 3)
    assert _priority() == before


def test_work_goes_on_where_the_system_forbids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(os, "setpriority", refuse)
    assert _asked_of(Workers(1, niceness=3)) == _priority()
