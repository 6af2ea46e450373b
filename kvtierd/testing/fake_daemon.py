"""The real server with a `FakeService` behind it: in a thread of this process, or as a process that can be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from kvtierd.protocol.server import Server
from kvtierd.protocol.sessions import Limits
from kvtierd.testing.fake_service import FakeService

T = TypeVar("T")


class ThreadDaemon:
    """A server whose loop runs in a thread: tests reach into `service` and `server` through `call`.

    `make` makes another kind of server for the service.
    """

    def __init__(
        self,
        folder: Path,
        service: FakeService | None = None,
        limits: Limits | None = None,
        *,
        arena: bool = True,
        make: Callable[[FakeService], Server] | None = None,
    ) -> None:
        self.service = service or FakeService()
        chunks = self.service if arena else None
        self.server = make(self.service) if make else Server(self.service, folder, limits=limits, chunks=chunks)
        self.endpoint = self.server.endpoint
        self.errors: list[str] = []
        self._started = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="fake-daemon")

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(lambda _, context: self.errors.append(repr(context)))
        self._stop = asyncio.Event()
        try:
            await self.server.start()
        except Exception as error:  # noqa: BLE001 - raised where the thread was started
            self._failure = error
        self.endpoint = self.server.endpoint  # a port may have been chosen by now
        self._started.set()
        if self._failure is None:
            await self._stop.wait()
            await self.server.close()
        self.service.close()

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the server's loop and return its result."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait(30)
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        if kind is None and self.errors:
            raise AssertionError(f"the server's loop met errors: {self.errors}")


class ProcessDaemon:
    """A server as a process of its own, which a test may freeze, wake and kill."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "kvtierd.testing.fake_daemon", os.fspath(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.endpoint = self._process.stdout.readline().strip()
        self.pid = self._process.pid
        if not self.endpoint.startswith("ipc://"):
            self.kill()
            raise AssertionError("the fake daemon did not start")

    def freeze(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def wake(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone; its sockets stay behind."""
        self._process.kill()
        self._reap()

    def stop(self) -> None:
        """Ask it to end, as its standard input does."""
        self._reap()

    def _reap(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.returncode is None:
            self.wake()
            self.stop()


async def _serve(folder: Path) -> None:
    loop = asyncio.get_running_loop()
    service = FakeService()
    server = Server(service, folder, chunks=service)
    await server.start(replace_stale=True)
    done = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), done.set)
    sys.stdout.write(server.endpoint + "\n")
    sys.stdout.flush()
    await done.wait()
    loop.remove_reader(sys.stdin.fileno())
    await server.close()
    service.close()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
