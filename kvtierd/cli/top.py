"""`kvtierctl top`: what the daemon does now, refreshed until interrupted."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any

from kvtierd.cli import operators, output
from kvtierd.core.units import format_bytes

CLEAR = "\x1b[H\x1b[J"
RATES = {
    "requests": "server_requests_total",
    "tokens asked for": "lookup_tokens",
    "tokens found in gpu": "hit_gpu_tokens",
    "tokens found in host": "hit_host_tokens",
    "tokens found in nvme": "hit_nvme_tokens",
    "blocks committed": "committed_blocks",
    "blocks leased": "acquired_blocks",
    "blocks onboarded": "onboarded_blocks",
    "blocks offloaded": "offloaded_blocks",
    "host evictions": "host_evicted_blocks",
    "gpu evictions": "gpu_evicted_blocks",
}
"""What is shown per second, and the counter behind it."""
BYTE_RATES = {
    "committed": "committed_bytes",
    "read from nvme": "nvme_read_bytes",
    "written to nvme": "nvme_written_bytes",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How often, and how many times."""
    operators.add_arguments(parser)
    parser.add_argument(
        "-d", "--delay", type=output.seconds, default=2.0, metavar="S", help="seconds between (%(default)s)"
    )
    parser.add_argument(
        "-n", "--count", type=output.count, default=0, metavar="N", help="stop after so many (else never)"
    )


def run(args: argparse.Namespace) -> int:
    """Print one picture after another."""
    before, begin_s = _stats(args), time.monotonic()
    shown = 0
    while True:
        time.sleep(max(0.05, args.delay))
        now, now_s = _stats(args), time.monotonic()
        picture = rates(before["stats"], now["stats"], now_s - begin_s)
        text = f"{now['status']}\n\n{tiers(now['stats'])}\n\n{output.values(_shown(picture))}"
        clear = CLEAR if sys.stdout.isatty() and args.format == "text" else ""
        output.say(args, clear + text, {"status": now["status"], "per_second": picture})
        before, begin_s = now, now_s
        shown += 1
        if shown == args.count:
            return 0


def rates(before: Mapping[str, Any], now: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """Per second, by what is shown; counters that this daemon does not have are left out."""
    found = {
        title: (now[name] - before.get(name, 0)) / seconds
        for title, name in {**RATES, **{f"bytes {title}": name for title, name in BYTE_RATES.items()}}.items()
        if name in now
    }
    asked = found.get("tokens asked for", 0.0)
    hit = sum(found.get(f"tokens found in {tier}", 0.0) for tier in ("gpu", "host", "nvme"))
    return {**found, "hit ratio": hit / asked if asked else 0.0}


def tiers(stats: Mapping[str, Any]) -> str:
    """A row a tier: how full it is."""
    rows = []
    for tier in ("gpu", "host", "nvme"):
        capacity, used = stats.get(f"{tier}_capacity_bytes", 0), stats.get(f"{tier}_used_bytes", 0)
        share = used / capacity if capacity else 0.0
        bar = "#" * round(share * 30)
        rows.append(
            (tier, f"{bar:<30}", f"{share:.0%}", format_bytes(used), format_bytes(capacity), stats[f"{tier}_blocks"])
        )
    return output.columns(("tier", "", "used", "", "of", "blocks"), rows)


def _shown(picture: Mapping[str, float]) -> dict[str, str]:
    return {
        f"{title}/s" if title != "hit ratio" else title: (
            f"{format_bytes(value)}"
            if title.startswith("bytes")
            else f"{value:.1%}"
            if title == "hit ratio"
            else f"{value:,.0f}"
        )
        for title, value in picture.items()
    }


def _stats(args: argparse.Namespace) -> dict[str, Any]:
    found = operators.ask(args, "/info")
    stats = {name: value for section in found["sections"].values() for name, value in section.items()}
    return {"status": found["status"], "stats": stats}
