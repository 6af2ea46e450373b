"""What the daemon says of itself among its statistics: the process and its endpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtierd import __version__
from kvtierd.daemon.endpoints import Endpoints
from kvtierd.daemon.tenant_events import TenantEvents

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


def reporter(server: Endpoints, events: TenantEvents | None) -> Callable[[], Mapping[str, Any]]:
    """A function that reads the numbers now; every name is a row of kvtierd.telemetry.metrics."""
    begin_s = time.monotonic()

    def read() -> Mapping[str, Any]:
        return {
            "daemon_version": __version__,
            "daemon_pid": os.getpid(),
            "daemon_uptime_s": int(time.monotonic() - begin_s),
            "daemon_resident_bytes": int(_STATM.read_text().split()[1]) * _PAGE_BYTES,
            "server_sessions": server.sessions,
            "server_sessions_opened_total": server.sessions_opened_total,
            "server_event_batches_total": events.batches_total if events else 0,
            **{f"server_{name}": value for name, value in server.counters.items()},
        }

    return read
