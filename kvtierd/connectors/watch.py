"""Keeps a client's session alive beside the engine, so that the first request after a daemon's restart finds it."""

from __future__ import annotations

import logging
import threading

from kvtierd.core.errors import KvtierdError
from kvtierd.protocol.client import Client

PING_S, RETRY_S = 1.0, 0.2
"""Between two pings of a daemon that is there, and of one that is not."""
PATIENCE_S = 0.5


class Watch:
    """Pings the daemon from a thread of its own, and logs at `level` when it goes, and what the engine does meanwhile,
    and when it comes back."""

    def __init__(
        self, client: Client, log: logging.Logger, level: int, meanwhile: str = "prompts are computed meanwhile"
    ) -> None:
        self._client = client
        self._logger = log
        self._level = level
        self._meanwhile = meanwhile
        self._ended = threading.Event()
        self.away = False
        self._ask()
        self._thread = threading.Thread(target=self._run, name="kvtierd-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(RETRY_S if self.away else PING_S):
            self._ask()

    def _ask(self) -> None:
        try:
            self._client.ping(timeout_s=PATIENCE_S)
        except KvtierdError as error:
            if not self.away and not self._ended.is_set():
                self._logger.log(self._level, "kvtierd: %s; %s", error, self._meanwhile)
            self.away = True
            return
        if self.away:
            self._logger.log(self._level, "kvtierd: the daemon at %s is back", self._client.endpoint)
        self.away = False
