"""When the daemon stops: signals, and the descriptor by which whoever embeds it holds it alive."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """The first request sets `graceful`: drain, flush, exit. A second one sets `at_once`: what is dirty is dropped."""

    def __init__(self) -> None:
        self.graceful = asyncio.Event()
        self.at_once = asyncio.Event()

    def install(self, loop: asyncio.AbstractEventLoop, stop_fd: int = -1) -> None:
        """Listen to the stop signals and, where there is one, to a pipe that closes when its other end dies."""
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self.ask, number.name)
        if stop_fd >= 0:
            os.set_blocking(stop_fd, False)
            loop.add_reader(stop_fd, self._stop_fd_ready, loop, stop_fd)

    def ask(self, reason: str) -> None:
        """Ask once for a graceful stop, once more for an immediate one."""
        if self.graceful.is_set():
            log.warning("%s again: stopping without flushing", reason)
            self.at_once.set()
        else:
            log.info("%s: draining and stopping", reason)
            self.graceful.set()

    def _stop_fd_ready(self, loop: asyncio.AbstractEventLoop, stop_fd: int) -> None:
        if os.read(stop_fd, 64):
            return
        loop.remove_reader(stop_fd)
        os.close(stop_fd)
        self.ask("the stop descriptor was closed")
