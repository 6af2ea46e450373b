"""`kvtierctl tenants`: who is served, what each has in the tiers, and its quotas.

Sizes are what a tenant has of what it may have. Of nvme only tenants with a quota are counted here; `kvtierctl
namespaces` has the blocks of all.
"""

from __future__ import annotations

import argparse
from typing import Any

from kvtierd.cli import operators, output
from kvtierd.core.units import format_bytes

_HEADS = ("tenant", "clients", "requests", "namespaces", "host", "gpu", "nvme", "remote keys")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which daemon."""
    operators.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print a table."""
    found = operators.ask(args, "/tenants")["tenants"]
    rows = [
        (
            one["tenant"],
            one["sessions"],
            _of(one["requests"], one["requests_limit"], str),
            one["namespaces"],
            *(_of(one[f"{tier}_used_bytes"], one[f"{tier}_limit_bytes"], format_bytes) for tier in ("host", "gpu")),
            _of(one["nvme_used_bytes"], one["nvme_limit_bytes"], format_bytes) if one["nvme_limit_bytes"] else "-",
            one["keys"],
        )
        for one in found
    ]
    output.say(args, output.columns(_HEADS, rows), found)
    return 0


def _of(used: int, limit: int, show: Any) -> str:
    return f"{show(used)} of {show(limit)}" if limit else str(show(used))
