"""`kvtierctl demo`: a real model's KV in all three tiers and over a restart, as a table of what happened."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import time
from pathlib import Path

from kvtierd.bench.rows import as_json
from kvtierd.cli.errors import CommandError, Failure
from kvtierd.connectors.demo_table import Line, as_table, bench_row
from kvtierd.connectors.model_files import INSTALL, ModelUnavailableError

EXIT_WRONG = 1
_NEEDED = ("torch", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--json", action="store_true", help="one JSON object a line, as in `kvtierctl bench`")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="where the temporary store lies")


def run(args: argparse.Namespace) -> int:
    """Run it on a daemon of its own. Exits 1 when an answer differs or a tier did not serve."""
    begin_s = time.monotonic()

    def progress(line: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - begin_s:5.1f} s] {line}\n")

    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise CommandError(Failure.UNAVAILABLE, f"the demo wants {' and '.join(missing)}: {INSTALL}")
    # A SIGTERM unwinds too: the daemon is stopped and the temporary folder removed.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    progress("importing torch and transformers")
    from kvtierd.connectors.demo import run_demo  # takes seconds, and is wanted by no other command

    lines: list[Line] = []
    try:
        for line in run_demo(progress, args.directory):
            lines.append(line)
            if args.json and line.tier:
                print(as_json(bench_row(line)), flush=True)
    except ModelUnavailableError as error:
        raise CommandError(Failure.UNAVAILABLE, str(error)) from error
    if not args.json:
        print(as_table(lines))
    return 0 if all(line.ok for line in lines) else EXIT_WRONG
