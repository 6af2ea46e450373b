"""`kvtierctl stat`: the daemon's counters and gauges, as a table or as JSON."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

from kvtierd.cli import connection, output
from kvtierd.cli.connection import connect
from kvtierd.core.units import format_bytes
from kvtierd.telemetry.metrics import METRICS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which daemon, and in what form."""
    connection.add_arguments(parser)
    parser.add_argument("--json", action="store_const", dest="format", const="json", help="short for --format json")
    parser.add_argument("--explain", action="store_true", help="say what each value means")
    parser.add_argument(
        "--watch",
        type=output.seconds_or_none,
        default=0.0,
        metavar="S",
        help="every S seconds, until interrupted; shows what changed",
    )


def run(args: argparse.Namespace) -> int:
    """Print once, or again and again."""
    with connect(args) as client:
        before = client.stats()
        output.say(args, table(before, explain=args.explain), before)
        while args.watch > 0:
            time.sleep(args.watch)
            now = client.stats()
            output.say(args, changes(before, now), now)
            before = now
    return 0


def table(stats: Mapping[str, Any], *, explain: bool = False) -> str:
    """One line a value, names aligned; sizes are repeated as people write them."""
    width = max(map(len, stats), default=0)
    said = meanings() if explain else {}
    return "\n".join(_row(name, value, width, said.get(name, "")) for name, value in sorted(stats.items()))


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """One line with the time and every number that moved, and by how much."""
    moved = [
        f"{name} {now[name]}" + (f" ({value - before[name]:+})" if isinstance(before.get(name), int) else "")
        for name, value in sorted(now.items())
        if value != before.get(name) and isinstance(value, int)
    ]
    return f"{time.strftime('%H:%M:%S')} {', '.join(moved) or 'nothing changed'}"


def _row(name: str, value: Any, width: int, meaning: str) -> str:
    shown = f"{value} ({format_bytes(value)})" if name.endswith("_bytes") and isinstance(value, int) else str(value)
    return f"{name:<{width}}  {shown:<28}  {meaning}".rstrip()


def meanings() -> dict[str, str]:
    """What each value means; those of the store only where the extra `daemon` is installed."""
    found = {name: metric.meaning for name, metric in METRICS.items()}
    try:
        from kvtierd.storage.stats import COUNTERS, GAUGES
    except ModuleNotFoundError:
        return found
    return {**{f"nvme_{name}": meaning for name, meaning in (COUNTERS | GAUGES).items()}, **found}
