"""A daemon that can store once it has started, run by the interpreter that has what it needs: for engines' tests."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import kvtierd
from kvtierd.daemon.embedded import START_TIMEOUT_S, EmbeddedDaemon
from kvtierd.protocol.client import Client
from kvtierd.testing.waiting import wait_for

_ARENA_S = 120.0


class ReadyDaemon(EmbeddedDaemon):
    """Its host tier is made when it is taken for started: until then stores are refused as busy.

    It runs in the repository's own environment, since those of engines have the client alone.
    """

    python = str(Path(kvtierd.__file__).parents[1] / ".venv" / "bin" / "python")

    def start(self, timeout_s: float = START_TIMEOUT_S) -> Self:
        """As EmbeddedDaemon's."""
        super().start(timeout_s)
        with Client(self.endpoint, timeout_s=20) as probe:
            wait_for(lambda: _is_whole(probe), _ARENA_S)
        return self

    def blocks(self) -> int:
        """Blocks stored so far."""
        with Client(self.endpoint, timeout_s=20) as probe:
            return int(probe.stats()["committed_blocks"])

    def await_blocks(self, count: int) -> None:
        """Engines store beside their steps: wait until so many blocks are there."""
        wait_for(lambda: self.blocks() >= count, 60)


def _is_whole(client: Client) -> bool:
    stats = client.stats()
    assert not stats["memory_error"], stats["memory_error"]
    return bool(stats["host_ready_bytes"] >= stats["host_capacity_bytes"])
