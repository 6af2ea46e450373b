"""One life of the daemon: lock, compose, announce, wait, drain, take apart in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from kvtierd.config.loader import Loaded
from kvtierd.config.schema import Settings
from kvtierd.daemon.directories import Places, prepare_data, prepare_runtime
from kvtierd.daemon.lifecycle import StopRequest
from kvtierd.daemon.lock import RuntimeLock
from kvtierd.daemon.reload import Reloader
from kvtierd.daemon.state import dump
from kvtierd.telemetry.notify import notify, notify_status

T = TypeVar("T")

log = logging.getLogger(__name__)


class Serving(Protocol):
    """A composed daemon that answers clients."""

    endpoint: str

    def status(self) -> str:
        """One line for people: what it does now."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Everything that it counts, by name."""
        ...

    def apply(self, settings: Settings) -> None:
        """Take over those settings that may change now."""
        ...

    async def drain(self) -> None:
        """Take no more stores and bring every dirty block to stable storage, while lookups go on."""
        ...

    async def failed(self) -> BaseException:
        """Return the bug without whose mending the daemon must not go on; never returns while all is well."""
        ...


Compose = Callable[[Settings, Places], AbstractAsyncContextManager[Serving]]
"""Builds every part in order and takes all of them apart in reverse, also when a later one failed."""

Load = Callable[[Settings], Compose]
"""Imports the code that composes; called with the lock held, because compiling kernels can take seconds."""


async def run(
    settings: Settings, load: Load, *, reread: Callable[[], Loaded], ready_fd: int = -1, stop_fd: int = -1
) -> None:
    """Serve until a signal, or the end of `stop_fd`, says stop. Raises StartupError when it cannot start.

    `reread` loads the configuration again when SIGHUP asks for it.

    `ready_fd` gets one JSON line, `{"endpoint": ..., "pid": ...}`, once clients are served, and is closed; at a
    failed start it is closed without a line when the process ends.
    """
    begin_s = time.monotonic()
    stop = StopRequest()
    stop.install(asyncio.get_running_loop(), stop_fd)
    reloader = Reloader(settings, reread)
    # From the first moment: by default both signals end a process.
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.ask)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, dump, None)
    notify_status("starting")
    places = Places.of(settings)
    prepare_runtime(places)
    lock = RuntimeLock(places.lock)
    try:
        prepare_data(places)
        async with contextlib.AsyncExitStack() as parts:
            start = parts.enter_async_context(load(settings)(settings, places))
            await _serve(start, stop, reloader, ready_fd, begin_s)
    finally:
        lock.release()
    log.info("stopped")


async def _serve(
    start: Coroutine[Any, Any, Serving], stop: StopRequest, reloader: Reloader, ready_fd: int, begin_s: float
) -> None:
    starting = await _unless(stop.graceful, start)
    if starting.cancelled():
        log.info("stopped while starting")
        return
    serving = starting.result()
    _announce(serving.endpoint, ready_fd, time.monotonic() - begin_s)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, dump, serving)
    failing = await _unless(stop.graceful, _failed(serving, reloader))
    notify("STOPPING=1\nSTATUS=stopping")
    if not failing.cancelled():
        raise failing.result()
    draining = await _unless(stop.at_once, serving.drain())
    if draining.cancelled():
        log.warning("stopped before everything was flushed")
    else:
        draining.result()


async def _failed(serving: Serving, reloader: Reloader) -> BaseException:
    """Reload when asked, until something fails for good."""
    reloading = asyncio.create_task(reloader.serve(serving.apply, serving.status), name="reloader")
    failing = asyncio.create_task(serving.failed(), name="failure")
    try:
        done, _ = await asyncio.wait({reloading, failing}, return_when=asyncio.FIRST_COMPLETED)
        return failing.result() if failing in done else _bug_of(reloading)
    finally:
        reloading.cancel()
        failing.cancel()
        await asyncio.wait({reloading, failing})


def _bug_of(task: asyncio.Task[None]) -> BaseException:
    return task.exception() or AssertionError("a task that never ends has ended")


def _announce(endpoint: str, ready_fd: int, seconds: float) -> None:
    log.info("READY on %s after %.2f s", endpoint, seconds, extra={"fields": {"pid": os.getpid()}})
    notify(f"READY=1\nMAINPID={os.getpid()}\nSTATUS=serving on {endpoint}")
    if ready_fd >= 0:
        with os.fdopen(ready_fd, "w") as pipe, contextlib.suppress(BrokenPipeError):
            pipe.write(json.dumps({"endpoint": endpoint, "pid": os.getpid()}) + "\n")


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Do work, or cancel it when the event comes first; returns the finished task."""
    task, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        task.cancel()  # does nothing to a task that is done
        await asyncio.wait({task, waiting})
    return task
