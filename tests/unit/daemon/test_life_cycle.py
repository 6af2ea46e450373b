"""The order of one life, with parts that only record what happens to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvtierd.config.schema import Nvme, Server, Settings
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
        self.task = asyncio.create_task(run(settings, lambda _: parts.compose, ready_fd=ready_fd, stop_fd=stop_fd))

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
            await run(settings, lambda _: second.compose)
        assert caught.value.exit_code == ExitCode.LOCKED
        assert second.events == []
        assert socket_of_the_first.exists()
        life.stop()
        await life.task

    asyncio.run(scenario())
