"""What the live page shows, as one JSON object; the page itself is live.html beside this file.

It is for anybody on the machine, so it names no model or client, and tenants only where `metrics.tenants` says so:
namespaces are the beginnings of their digests, which `kvtierctl namespaces` explains to operators.
"""

from __future__ import annotations

import functools
import importlib.resources
import time
from collections.abc import Mapping
from typing import Any, Protocol

from kvtierd.daemon.census import Census
from kvtierd.daemon.requests import RequestLog
from kvtierd.daemon.tenant_metrics import TenantNumbers

TIERS = ("gpu", "host", "nvme")
FLOWS = {
    "client>host": "committed_bytes",
    "host>client": "host_to_client_moved_bytes",
    "host>nvme": "nvme_stored_bytes",
    "nvme>host": "nvme_read_bytes",
    "host>gpu": "host_to_gpu_moved_bytes",
    "gpu>host": "gpu_to_host_moved_bytes",
}
"""Ways that bytes take, and the counter of each."""
NAMESPACES = 8
SLOW = 12
DIGEST_DIGITS = 16
_SLOW_FIELDS = ("time", "what", "ms", "blocks", "outcome")


class Shown(Protocol):
    """What the page shows of a daemon."""

    requests: RequestLog

    def state(self) -> Mapping[str, Any]:
        """Every statistic by name."""
        ...

    def status(self) -> str:
        """One line: what it does."""
        ...

    def namespaces(self, census: Census) -> list[dict[str, Any]]:
        """Every namespace with its blocks."""
        ...

    @property
    def shows_tenants(self) -> bool:
        """Whether anybody may read what each tenant has and does."""
        ...

    def tenant_numbers(self, census: Census) -> list[TenantNumbers]:
        """What each tenant that is served has and does."""
        ...


@functools.cache
def page() -> bytes:
    """The page: one file, nothing else is loaded."""
    return (importlib.resources.files("kvtierd.daemon") / "live.html").read_bytes()


def snapshot(shown: Shown, census: Census) -> dict[str, Any]:
    """The numbers of this moment; counters are totals, rates are the page's to compute."""
    stats = shown.state()
    largest = sorted(shown.namespaces(census), key=lambda entry: entry["bytes"], reverse=True)[:NAMESPACES]
    slow, _, _ = shown.requests.slow_since(0)
    return {
        "clock_s": time.monotonic(),
        "status": shown.status().partition(" on ipc:")[0],
        "version": stats.get("daemon_version", ""),
        "mode": stats.get("nvme_mode", "none"),
        "clients": stats.get("server_sessions", 0),
        "tiers": {
            tier: {what: stats.get(f"{tier}_{what}", 0) for what in ("capacity_bytes", "used_bytes", "blocks")}
            for tier in TIERS
        },
        "dirty_blocks": census.states()["host", "dirty"],
        "queue_bytes": stats.get("write_queue_bytes", 0),
        "flows": {flow: stats.get(name, 0) for flow, name in FLOWS.items()},
        "asked_tokens": stats.get("lookup_tokens", 0),
        "hit_tokens": {tier: stats.get(f"hit_{tier}_tokens", 0) for tier in TIERS},
        "requests": {
            name: {"count": histogram.count, "p50_s": _finite(histogram.quantile(0.5)),
                   "p99_s": _finite(histogram.quantile(0.99))}
            for name, histogram in sorted(shown.requests.seconds.items())
        },
        "namespaces": [
            {"digest": entry["digest"][:DIGEST_DIGITS], "blocks": entry["blocks"], "bytes": entry["bytes"]}
            for entry in largest
        ],
        "tenants": [_tenant(tenant) for tenant in shown.tenant_numbers(census)] if shown.shows_tenants else [],
        "slow_ms": shown.requests.slow_ms,
        "slow": [{name: entry[name] for name in _SLOW_FIELDS} for entry in slow[-SLOW:]],
    }  # fmt: skip


def _tenant(tenant: TenantNumbers) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "clients": tenant.sessions,
        "bytes": tenant.used_bytes,
        "held_bytes": tenant.held_bytes or 0,
        "asked_tokens": tenant.tokens.asked,
        "hit_tokens": sum(tenant.tokens.hits(tier) for tier in tenant.blocks),
        "refused": sum(tenant.refusals.values()),
    }


def _finite(seconds: float) -> float | None:
    """JSON has no word for infinity."""
    return seconds if seconds < float("inf") else None
