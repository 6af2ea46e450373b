"""The watchdog is fed while work moves, and only then."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtierd.core.clock import ManualClock, SystemClock
from kvtierd.core.progress import Progress
from kvtierd.daemon.liveness import Liveness, Watchdog, long_step
from kvtierd.telemetry.notify import notify_status, watchdog_period_s


class Listener:
    """What a service manager would hear."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(0)

    def heard(self) -> list[str]:
        lines: list[str] = []
        while True:
            try:
                lines += self._socket.recv(4096).decode().splitlines()
            except BlockingIOError:
                return lines

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    listener = Listener(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    yield listener
    listener.close()


def test_work_that_moves_is_not_stuck_however_long_it_takes() -> None:
    clock, disk = ManualClock(), Progress(begun=100)
    liveness = Liveness({"nvme": disk}, 30.0, clock)
    for _ in range(50):
        clock.advance(29)
        disk.ended += 1
        assert liveness.stuck() == ""


def test_work_of_which_nothing_ends_is_stuck_and_named() -> None:
    clock, disk, copies = ManualClock(), Progress(begun=3, ended=1), Progress(begun=5, ended=5)
    liveness = Liveness({"nvme": disk, "copies": copies}, 30.0, clock)
    assert liveness.stuck() == ""
    clock.advance(31)
    assert liveness.stuck() == "nvme: 2 jobs, none finished for 31 s"
    disk.ended += 1
    assert liveness.stuck() == ""


def test_idle_time_does_not_count() -> None:
    clock, disk = ManualClock(), Progress()
    liveness = Liveness({"nvme": disk}, 30.0, clock)
    clock.advance(3600)
    assert liveness.stuck() == ""
    disk.begun += 1
    clock.advance(29)
    assert liveness.stuck() == ""


def test_watchdog_is_fed_while_work_moves_and_not_while_it_is_stuck(manager: Listener) -> None:
    async def scenario() -> None:
        clock, disk = ManualClock(), Progress()
        watchdog = Watchdog(Liveness({"nvme": disk}, 30.0, clock), 0.004, lambda: "fine")
        task = asyncio.create_task(watchdog.run())
        await _until(lambda: "WATCHDOG=1" in manager.heard())
        disk.begun += 1
        await _until(lambda: not disk.ended and watchdog.stuck == "" and bool(manager.heard()))
        clock.advance(31)
        await _until(lambda: watchdog.stuck != "")
        manager.heard()
        await asyncio.sleep(0.02)
        assert "WATCHDOG=1" not in manager.heard()
        disk.ended += 1
        await _until(lambda: "WATCHDOG=1" in manager.heard())
        task.cancel()

    asyncio.run(scenario())


def test_long_step_tells_its_status_and_asks_for_time(manager: Listener) -> None:
    async def scenario() -> None:
        async with long_step(lambda: "recovering", Liveness({}, 30.0, SystemClock())):
            await _until(lambda: {"STATUS=recovering", "EXTEND_TIMEOUT_USEC=30000000"} <= set(manager.heard()))

    asyncio.run(scenario())


def test_long_step_that_is_stuck_asks_for_no_more_time(manager: Listener) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        liveness = Liveness({"nvme": Progress(begun=1)}, 30.0, clock)
        liveness.stuck()
        clock.advance(31)
        async with long_step(lambda: "recovering", liveness):
            await asyncio.sleep(0.01)
        assert manager.heard() == ["STATUS=recovering"]

    asyncio.run(scenario())


def test_status_is_one_line(manager: Listener) -> None:
    assert notify_status("one\nREADY=1")
    assert manager.heard() == ["STATUS=one READY=1"]


@pytest.mark.parametrize(
    ("period", "pid", "seconds"), [("", "", 0.0), ("30000000", "", 30.0), ("5", "1", 0.0), ("x", "", 0.0)]
)
def test_watchdog_of_another_process_is_not_ours(
    monkeypatch: pytest.MonkeyPatch, period: str, pid: str, seconds: float
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", period)
    monkeypatch.setenv("WATCHDOG_PID", pid)
    assert watchdog_period_s() == seconds


async def _until(holds) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.001)
