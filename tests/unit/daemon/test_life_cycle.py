"""The order of one life, with parts that only record what happens to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvtierd.config.loader import ConfigError, Loaded
from kvtierd.config.origins import Problem
from kvtierd.config.schema import Log, Nvme, Server, Settings
from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.daemon.app import run
from kvtierd.daemon.directories import Places


class Parts:
    """A composition under the test's control."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.start_gate = asyncio.Event()
        self.drain_gate = asyncio.Event()
        self.start_gate.set()
        self.drain_gate.set()
        self.start_error: Exception | None = None
        self.drain_error: Exception | None = None
        self.applied: Settings | None = None
        self.written: Callable[[], Loaded] = lambda: Loaded(Settings(), {})
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    @contextlib.asynccontextmanager
    async def compose(self, _settings: Settings, places: Places) -> AsyncIterator[Parts]:
        self.endpoint = f"ipc://{places.tenant}/kvtierd.sock"
        self.events.append("starting")
        try:
            await self.start_gate.wait()
            if self.start_error:
                raise self.start_error
            self.events.append("started")
            yield self
        finally:
            self.events.append("closed")

    def reread(self) -> Loaded:
        return self.written()

    def status(self) -> str:
        return "serving"

    def state(self) -> dict[str, int]:
        return {"host_blocks": 1}

    def apply(self, settings: Settings) -> None:
        self.applied = settings

    async def failed(self) -> BaseException:
        return await self.failure

    async def drain(self) -> None:
        self.events.append("draining")
        await self.drain_gate.wait()
        if self.drain_error:
            raise self.drain_error
        self.events.append("drained")


class Life:
    """A daemon running in the test's loop, held by its stop descriptor."""

    def __init__(self, settings: Settings, parts: Parts) -> None:
        ready, ready_fd = os.pipe()
        stop_fd, self._stop = os.pipe()
        self._ready = os.fdopen(ready)
        self.task = asyncio.create_task(
            run(settings, lambda _: parts.compose, reread=parts.reread, ready_fd=ready_fd, stop_fd=stop_fd)
        )

    async def ready(self) -> dict:
        return json.loads(await asyncio.to_thread(self._ready.readline))

    def stop(self) -> None:
        os.close(self._stop)
        self._ready.close()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(server=Server(runtime_dir=str(tmp_path / "r")), nvme=Nvme(directory=str(tmp_path / "d")))


def test_life_is_start_announce_drain_close(settings: Settings) -> None:
    async def scenario() -> list[str]:
        parts = Parts()
        life = Life(settings, parts)
        ready = await life.ready()
        assert ready == {"endpoint": parts.endpoint, "pid": os.getpid()}
        assert parts.events == ["starting", "started"]
        life.stop()
        await life.task
        return parts.events

    assert asyncio.run(scenario()) == ["starting", "started", "draining", "drained", "closed"]


def test_a_bug_that_stops_a_part_for_good_ends_the_process_instead_of_serving_on(settings: Settings) -> None:
    async def scenario() -> list[str]:
        parts = Parts()
        life = Life(settings, parts)
        await life.ready()
        parts.failure.set_result(AssertionError("the ticker stopped"))
        with pytest.raises(AssertionError, match="the ticker stopped"):
            await life.task
        life.stop()
        return parts.events

    assert asyncio.run(scenario()) == ["starting", "started", "closed"]


def test_stop_while_starting_takes_apart_what_was_there(settings: Settings) -> None:
    async def scenario() -> list[str]:
        parts = Parts()
        parts.start_gate.clear()
        life = Life(settings, parts)
        while not parts.events:
            await asyncio.sleep(0)
        life.stop()
        await life.task
        return parts.events

    assert asyncio.run(scenario()) == ["starting", "closed"]


def test_second_stop_does_not_wait_for_the_flush(settings: Settings) -> None:
    async def scenario() -> list[str]:
        parts = Parts()
        parts.drain_gate.clear()
        life = Life(settings, parts)
        await life.ready()
        life.stop()
        while "draining" not in parts.events:
            await asyncio.sleep(0)
        os.kill(os.getpid(), 15)
        await life.task
        return parts.events

    assert asyncio.run(scenario()) == ["starting", "started", "draining", "closed"]


@pytest.mark.parametrize("where", ["start_error", "drain_error"])
def test_error_of_a_part_is_raised_after_the_rest_was_closed(settings: Settings, where: str) -> None:
    parts_of: list[Parts] = []

    async def scenario() -> None:
        parts = Parts()
        parts_of.append(parts)
        setattr(parts, where, StartupError(ExitCode.IO, "the disk is gone"))
        life = Life(settings, parts)
        life.stop() if where == "drain_error" and await life.ready() else None
        try:
            await life.task
        finally:
            if where == "start_error":
                life.stop()

    with pytest.raises(StartupError, match="the disk is gone"):
        asyncio.run(scenario())
    assert parts_of[0].events[-1] == "closed"


def test_case_06_second_daemon_is_refused_before_anything_is_built(settings: Settings) -> None:
    async def scenario() -> None:
        first, second = Parts(), Parts()
        life = Life(settings, first)
        await life.ready()
        socket_of_the_first = Path(first.endpoint.removeprefix("ipc://"))
        socket_of_the_first.write_text("")
        with pytest.raises(StartupError) as caught:
            await run(settings, lambda _: second.compose, reread=second.reread)
        assert caught.value.exit_code == ExitCode.LOCKED
        assert second.events == []
        assert socket_of_the_first.exists()
        life.stop()
        await life.task

    asyncio.run(scenario())


def test_hangup_reloads_and_a_mistake_keeps_what_was(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        parts = Parts()
        life = Life(settings, parts)
        await life.ready()
        parts.written = lambda: Loaded(msgspec.structs.replace(settings, log=Log(level="debug")), {})
        os.kill(os.getpid(), signal.SIGHUP)
        await _until(lambda: parts.applied is not None)
        assert parts.applied == msgspec.structs.replace(settings, log=Log(level="debug"))

        def broken() -> Loaded:
            raise ConfigError([Problem("kvtierd.yaml:3", "log.level", "'loud' is not one of them")])

        parts.written, parts.applied = broken, None
        os.kill(os.getpid(), signal.SIGHUP)
        await _until(lambda: "all settings stay as they were" in caplog.text)
        assert "kvtierd.yaml:3: log.level: 'loud' is not one of them" in caplog.text
        assert parts.applied is None
        life.stop()
        await life.task

    with _captured(caplog):
        asyncio.run(scenario())


def test_hangup_while_starting_reloads_once_ready(settings: Settings) -> None:
    async def scenario() -> None:
        parts = Parts()
        parts.start_gate.clear()
        parts.written = lambda: Loaded(msgspec.structs.replace(settings, log=Log(level="debug")), {})
        life = Life(settings, parts)
        while not parts.events:
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        assert parts.applied is None
        parts.start_gate.set()
        await _until(lambda: parts.applied is not None)
        life.stop()
        await life.task

    asyncio.run(scenario())


def test_usr1_writes_the_state_to_the_log_at_any_time(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        parts = Parts()
        parts.start_gate.clear()
        life = Life(settings, parts)
        while not parts.events:
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGUSR1)
        await _until(lambda: "state: starting" in caplog.text)
        parts.start_gate.set()
        await life.ready()
        os.kill(os.getpid(), signal.SIGUSR1)
        await _until(lambda: "state: host" in caplog.text)
        life.stop()
        await life.task

    with _captured(caplog):
        asyncio.run(scenario())
    line = next(record for record in caplog.records if record.getMessage() == "state: host")
    assert line.fields == {"host_blocks": 1}


@contextlib.contextmanager
def _captured(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What our loggers say, and as it was afterwards: a reload configures them anew."""
    logger = logging.getLogger("kvtierd")
    before = logger.handlers, logger.level, logger.propagate
    logger.setLevel("DEBUG")
    for name in ("kvtierd.daemon.reload", "kvtierd.daemon.state"):
        logging.getLogger(name).addHandler(caplog.handler)
    try:
        yield
    finally:
        for name in ("kvtierd.daemon.reload", "kvtierd.daemon.state"):
            logging.getLogger(name).removeHandler(caplog.handler)
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.001)
