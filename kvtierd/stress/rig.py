"""What all phases of a run share: options, contents, client processes, somebody who looks on, and what was found."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np

from kvtierd.bench.options import thread_count
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.protocol.client import Client
from kvtierd.stress.content import Content
from kvtierd.stress.options import Options
from kvtierd.stress.processes import Crew
from kvtierd.stress.watch import Watch

TIMEOUT_S = 120.0
"""Of every call: a stall is a slow figure, and no miss."""
CHAOS_TIMEOUT_S = 5.0
"""Of clients whose daemon is killed now and then."""


@dataclasses.dataclass(slots=True)
class Found:
    """All that a run has measured and found. Rates are in bytes a second, times in seconds."""

    options: Options
    findings: list[str] = dataclasses.field(default_factory=list)
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    counts: dict[str, Any] = dataclasses.field(default_factory=dict)
    ended_at: str = ""
    """The phase in which it could not go on; "" where it came to its end."""

    @property
    def passed(self) -> bool:
        """The verdict."""
        return not self.findings and not self.ended_at


class Rig:
    """Of one run. `close` ends the client processes."""

    def __init__(
        self, options: Options, folder: Path, out: TextIO, endpoint: str, daemon: EmbeddedDaemon | None
    ) -> None:
        self.options, self.folder, self.endpoint, self.daemon = options, folder, endpoint, daemon
        self.threads = thread_count()
        self.content = Content(options.seed, options.kv, lossy=options.fp8)
        self.found = Found(options)
        self.keys = self.content.keys((0, options.blocks))
        self.client = Client(endpoint, timeout_s=TIMEOUT_S, transfer_timeout_s=TIMEOUT_S, arena=False, name="stress")
        try:
            self.handle = self.client.register(self.content.namespace, allow_loss=options.fp8)
            self.crew = Crew([self.config(number) for number in range(options.clients)], folder)
        except BaseException:
            self.client.close()
            raise
        self.watch = Watch(endpoint, lambda: self.crew.pids, options.clients, out)
        self.watch.start()

    def shares(self) -> Iterator[tuple[int, int]]:
        """Begin and end of each client's share of the context's blocks."""
        yield from itertools.pairwise(
            np.linspace(0, self.options.blocks, self.options.clients + 1).astype(int).tolist()
        )

    def config(self, number: int) -> dict[str, Any]:
        """Of a client process."""
        return {
            "endpoint": self.endpoint,
            "number": number,
            "seed": self.options.seed,
            "geometry": msgspec.to_builtins(self.options.kv),
            "lossy": self.options.fp8,
            "heads": self.options.query_heads,
            "blocks": self.options.blocks,
            "timeout_s": CHAOS_TIMEOUT_S if self.options.chaos else TIMEOUT_S,
        }

    def close(self) -> None:
        """End everything but the daemon."""
        self.watch.close()
        self.crew.close()
        self.client.close()
