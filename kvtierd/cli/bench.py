"""`kvtierctl bench`: figures, each with a reference of the same run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from kvtierd.bench.catalogue import BENCHES, PARTS, run_bench
from kvtierd.bench.options import Options, busy_note
from kvtierd.bench.rows import Row, as_json, as_table
from kvtierd.core.errors import ExitCode, KvtierdError
from kvtierd.daemon.embedded import EmbeddedDaemonError

EXIT_MISSED = 1
EXIT_CANNOT_RUN = 69  # EX_UNAVAILABLE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    described = "\n".join(f"  {name:<10}{what}" for name, what in BENCHES.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"benches:\n{described}\n  {'all':<10}each of them in turn"
    parser.add_argument("name", choices=[*BENCHES, "all"], metavar="NAME", help="which bench; see below")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="trace to replay (for trace)")
    parser.add_argument("--tier-blocks", type=_counts, default=(), metavar="N,N", help="capacities to replay with")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw the hit ratios as SVG (for trace)")
    parser.add_argument("--live", action="store_true", help="replay through a daemon, with real bytes (for trace)")
    parser.add_argument("--endpoint", default="", metavar="E", help="that daemon; without it one of its own is started")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="a part of it (naive, sweep)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under 40 s a bench, and noisier")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a goal is missed")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="where temporary stores lie (for nvme: the disk)")


def _counts(text: str) -> tuple[int, ...]:
    """Positive numbers with commas between them."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = (0,)
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be positive numbers like 1000,3000")
    return counts


def run(args: argparse.Namespace) -> int:
    """Run the benches asked for. A bench that cannot run here is named on standard error; the others still run."""
    if args.directory is not None and not args.directory.is_dir():
        print(f"kvtierctl bench: --directory {args.directory} is no folder", file=sys.stderr)
        return ExitCode.USAGE
    if args.file is not None and not args.file.is_file():
        print(f"kvtierctl bench: {args.file} is no file", file=sys.stderr)
        return ExitCode.USAGE
    if unknown := [part for part in args.only if part not in PARTS.get(args.name, ())]:
        there_are = ", ".join(f"{name}: {' '.join(parts)}" for name, parts in PARTS.items())
        print(f"kvtierctl bench: --only {unknown[0]} is no part of {args.name} ({there_are})", file=sys.stderr)
        return ExitCode.USAGE
    if note := busy_note():
        print(f"kvtierctl bench: {note}", file=sys.stderr)
    names = list(BENCHES) if args.name == "all" else [args.name]
    options = Options(
        quick=args.quick,
        directory=args.directory,
        file=args.file,
        tier_blocks=args.tier_blocks,
        plot=args.plot,
        live=args.live,
        endpoint=args.endpoint,
        only=tuple(args.only),
    )
    rows: list[Row] = []
    failed = False
    for name in names:
        try:
            rows += _shown(run_bench(name, options), as_lines=args.json)
        except (KvtierdError, EmbeddedDaemonError) as error:
            print(f"kvtierctl bench {name}: {error}", file=sys.stderr)
            failed = True
    if rows and not args.json:
        print(as_table(rows))
    if failed:
        return EXIT_CANNOT_RUN
    return EXIT_MISSED if args.strict and not all(row.ok for row in rows) else 0


def _shown(rows: Iterator[Row], *, as_lines: bool) -> Iterator[Row]:
    for row in rows:
        if as_lines:
            print(as_json(row), flush=True)
        else:
            print(f"{row.bench}: {row.metric} …", file=sys.stderr)
        yield row
