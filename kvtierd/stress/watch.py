"""While it runs: how full the tiers are, what memory daemon and clients take, and a line for whoever looks on."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from kvtierd.bench.smaps import total_bytes
from kvtierd.core.errors import KvtierdError
from kvtierd.core.units import MIB, format_bytes
from kvtierd.protocol.client import Client

PERIOD_S = 0.5
LINE_PERIOD_S = 5.0
"""Between two lines where nobody sits at a terminal."""
DAEMON_BYTES, CLIENT_BYTES = 200 * MIB, 100 * MIB
"""What daemon and each client may take beyond the budgets of gpu and host."""
BAR = 24


class Watch:
    """Looks twice a second, in a thread of its own, through a client of its own without the arena."""

    def __init__(self, endpoint: str, pids: Callable[[], Sequence[int]], clients: int, out: TextIO) -> None:
        self._client = Client(endpoint, timeout_s=1.0, arena=False, name="stress-watch")
        self._pids, self._clients, self._out = pids, clients, out
        self._stop = threading.Event()
        self._phase, self._done, self._total, self._begin_s = "", 0, 1, time.monotonic()
        self._line_s = 0.0
        self.daemon_pid = 0
        self.budget_bytes = 0
        self.peak_bytes = 0
        self.peak_phase = ""
        self.peak_parts: list[int] = []
        """Of the daemon and then of each client, at that moment."""
        self.stats: Mapping[str, Any] = {}
        self.reclaimed = False
        """Whether the store was full once and recycled blocks that could be read."""
        self._thread = threading.Thread(target=self._run, name="stress-watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self.ask()
        self._thread.start()

    def ask(self) -> Mapping[str, Any]:
        """All statistics of now; those of before where the daemon is away."""
        try:
            self.stats = self._client.stats()
        except KvtierdError:
            return self.stats
        self.reclaimed |= int(self.stats["nvme_reclaimed_segments"]) > 0
        tiers = int(self.stats["host_capacity_bytes"]) + int(self.stats.get("gpu_capacity_bytes", 0))
        self.budget_bytes = tiers + DAEMON_BYTES + self._clients * CLIENT_BYTES
        self.daemon_pid = int(self.stats["daemon_pid"])
        return self.stats

    def phase(self, name: str, total: int) -> None:
        """A phase begins, of so many units."""
        self._show(end="\n" if self._phase else "")
        self._phase, self._done, self._total, self._begin_s = name, 0, max(1, total), time.monotonic()

    def advance(self, count: int) -> None:
        """So many units more are done."""
        self._done += count

    def at(self, done: int) -> None:
        """So many units are done."""
        self._done = done

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self.ask()
            self._weigh()
            now_s = time.monotonic()
            if self._out.isatty() or now_s - self._line_s >= LINE_PERIOD_S:
                self._line_s = now_s
                self._show(end="" if self._out.isatty() else "\n")

    def _weigh(self) -> None:
        """Proportional set size of daemon and clients together; a process that has just ended weighs nothing."""
        sizes: list[int] = []
        for pid in [self.daemon_pid, *self._pids()]:
            try:
                sizes.append(total_bytes(pid))
            except (OSError, StopIteration):
                sizes.append(0)
        if sum(sizes) > self.peak_bytes:
            self.peak_bytes, self.peak_phase, self.peak_parts = sum(sizes), self._phase, sizes

    def _show(self, end: str) -> None:
        if not self._phase:
            return
        share = min(1.0, self._done / self._total)
        bar = "#" * round(share * BAR)
        seconds = time.monotonic() - self._begin_s
        text = f"{self._phase:<9} [{bar:<{BAR}}] {share:4.0%} {seconds:5.1f} s  {occupancy(self.stats)}"
        start = "\r\x1b[K" if self._out.isatty() else ""
        self._out.write(f"{start}{text}  memory {format_bytes(self.peak_bytes)} at most{end}")
        self._out.flush()

    def close(self) -> None:
        """Stop looking."""
        self._show(end="\n")
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._client.close()


def occupancy(stats: Mapping[str, Any]) -> str:
    """How full each tier is."""
    found = []
    for tier in ("gpu", "host", "nvme"):
        if capacity := int(stats.get(f"{tier}_capacity_bytes", 0)):
            used = int(stats[f"{tier}_used_bytes"])
            found.append(f"{tier} {used / capacity:.0%} of {format_bytes(capacity)}")
    return ", ".join(found)


def quiet_output() -> TextIO:
    """Where progress goes: standard error, so that the table can be piped."""
    return sys.stderr
