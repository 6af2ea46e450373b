"""How commands say things: text or JSON, or nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--format` and `-q`."""
    parser.add_argument("--format", choices=["text", "json"], default="text", help="form of the output (%(default)s)")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing: the exit code says it")


def seconds(text: str) -> float:
    """A time of an option; argparse says what is wrong with another one."""
    value = float(text)
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 3600]")
    return value


def seconds_or_none(text: str) -> float:
    """The same, where 0 stands for not at all."""
    return 0.0 if float(text) == 0 else seconds(text)


def count(text: str) -> int:
    """A number of things to show, from 0 on."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def say(args: argparse.Namespace, text: str, value: Any) -> None:
    """Print the text, or the value as one line of JSON."""
    if not args.quiet:
        print(json.dumps(value) if args.format == "json" else text, flush=True)


def columns(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table: numbers to the right, the rest to the left; the last column is not padded."""
    found = list(rows)
    table = [list(map(str, row)) for row in (heads, *found)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    right = [all(isinstance(row[i], int | float) for row in found) and bool(found) for i in range(len(heads))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if r else cell.ljust(width) for cell, width, r in zip(row, widths, right, strict=True)
        ]
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, table))


def values(entries: Mapping[str, Any]) -> str:
    """One `name value` a line, aligned."""
    width = max(map(len, entries), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in entries.items())
