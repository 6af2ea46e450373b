"""Options that choose blocks: what `blocks`, `pin`, `evict` and `purge` have in common."""

from __future__ import annotations

import argparse
from typing import Any

from kvtierd.cli import operators

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the daemon, the form of the output, and which blocks."""
    operators.add_arguments(parser)
    parser.add_argument("--tenant", metavar="T", default="", help="only those of a tenant")
    parser.add_argument("--namespace", metavar="N", default="", help="a model's name, or the beginning of a digest")
    parser.add_argument("--key", metavar="HEX", default="", help="the beginning of a block key")
    parser.add_argument("--older-than", type=age, metavar="AGE", default=0.0, help="not used for 30s, 10m, 2h, 7d, 4w")


def age(text: str) -> float:
    """Seconds of a text such as 7d; argparse says what is wrong with another one."""
    unit = UNITS_S.get(text[-1:], 0)
    try:
        count = float(text[:-1])
    except ValueError:
        unit = 0
    if not unit or not 0 < count < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no age; write one like 30s, 10m, 2h, 7d or 4w")
    return count * unit


def query_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the daemon is asked with."""
    query = {"tenant": args.tenant, "namespace": args.namespace, "key": args.key, "older_than_s": args.older_than}
    return {name: value for name, value in query.items() if value}
