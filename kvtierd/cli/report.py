"""`kvtierctl report`: the benches and the stress as one page with plots, and as BENCHMARKS.md."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvtierd.cli.errors import CommandError, Failure

if TYPE_CHECKING:
    from kvtierd.report.collect import Wanted
    from kvtierd.report.records import Record

EXIT_FAILED = 1
EXIT_NOT_DONE = 75


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("files", nargs="*", type=Path, metavar="FILE", help="recorded figures; without any, everything is run now")
    add("--output", type=Path, default=Path("report.html"), metavar="PATH", help="the page (%(default)s)")
    add("--markdown", type=Path, metavar="PATH", help="write the same figures as Markdown")
    add("--save", type=Path, metavar="PATH", help="add what is run now to a recording, to make a page of it again")
    add("--resume", action="store_true", help="with --save: run only what that recording has not, and show all of it")
    add(
        "--again",
        action="store_true",
        help="with --save: run all of that recording anew, the longest last; --bench adds to it",
    )
    add(
        "--for",
        type=float,
        default=math.inf,
        dest="seconds",
        metavar="S",
        help="begin no run after so many seconds; with --again, end it then",
    )
    add("--bench", action="append", metavar="NAME", help="run this bench only; may be given several times, or none")
    add(
        "--trace", action="append", type=Path, metavar="FILE", help="replay this file in the bench trace; several times"
    )
    add("--tokens", action="append", metavar="N", help="run the stress over so many tokens; several times, or none")
    add("--quick", action="store_true", help="quick benches, and the stress up to 128k tokens")
    add("--directory", type=Path, metavar="DIR", help="where temporary stores lie (the disk to measure)")


def run(args: argparse.Namespace) -> int:
    """Collect or read, then write. Exits 1 where a bench or the stress could not be run or found something, 75 where
    `--for` ended it: with `--resume` the same command goes on."""
    from kvtierd.report.markdown import as_markdown  # deferred: these load what only they want
    from kvtierd.report.page import as_html
    from kvtierd.report.records import latest, read_records
    from kvtierd.report.sections import sections

    whole = True
    if args.files:
        records = read_records(args.files)
    elif args.again:
        records, whole = _renewed(args)
    else:
        records, whole = _collected(args)
    records = latest(records)
    try:
        args.output.write_text(as_html(records, sections(records)))
        if args.markdown is not None:
            args.markdown.write_text(as_markdown(records))
    except OSError as error:
        raise CommandError(Failure.USAGE, f"{error.filename}: {error.strerror}") from error
    print(args.output)
    if not whole:
        return EXIT_NOT_DONE
    bad = [record for record in records if record.failed or (record.stress and record.stress.verdict != "pass")]
    return EXIT_FAILED if bad else 0


def _collected(args: argparse.Namespace) -> tuple[list[Record], bool]:
    """What was recorded before, if that is to be gone on with, and what is run now; whether that is all."""
    from kvtierd.report.collect import collect  # deferred: these load what only they want
    from kvtierd.report.records import as_line, read_records

    if args.resume and args.save is None:
        raise CommandError(Failure.USAGE, "--resume goes on with a recording: give it with --save")
    wanted = _wanted(args)
    records = read_records([args.save]) if args.resume and args.save.exists() else []
    for record in collect(wanted, list(records), time.monotonic() + args.seconds):
        if record is None:
            return records, False
        print(f"{record.command}: {record.failed or f'{len(record.rows)} figures'}", file=sys.stderr)
        records.append(record)
        if args.save is not None:
            with args.save.open("a") as file:
                file.write(as_line(record) + "\n")
    return records, True


def _renewed(args: argparse.Namespace) -> tuple[list[Record], bool]:
    """A recording with all of its commands run anew, as far as the time goes; whether it went for all."""
    from kvtierd.report import collect  # deferred: these load what only they want
    from kvtierd.report.records import as_line, read_records

    if args.save is None or not args.save.is_file():
        raise CommandError(Failure.USAGE, "--again runs the commands of a recording: name it with --save")
    records, begin_s = read_records([args.save]), time.monotonic()
    more = dataclasses.replace(_wanted(args), benches=args.bench or (), contexts=()).runs()
    runs, others = collect.again(records, more, args.directory)
    for other in others:
        print(f"{other}: kept as it is", file=sys.stderr)
    done = failed = 0
    for record in collect.renew(runs, begin_s + args.seconds):
        done += 1
        _, _, load = record.machine.rpartition(", load ")
        figures = record.failed or f"{len(record.rows)} figures"
        at_s = time.monotonic() - begin_s
        print(f"{record.command}: {figures}, at a load of {load} ({at_s:.0f} s since the start)", file=sys.stderr)
        if record.failed:
            failed += 1  # its earlier figures stay
            continue
        records.append(record)
        with args.save.open("a") as file:
            file.write(as_line(record) + "\n")
    for run in runs[done:]:
        print(f"{run.command}: no time was left; its figures are the earlier ones", file=sys.stderr)
    return records, done == len(runs) and not failed


def _wanted(args: argparse.Namespace) -> Wanted:
    from kvtierd.bench.catalogue import BENCHES as KNOWN  # deferred: these load what only they want
    from kvtierd.report import collect

    if unknown := [name for name in args.bench or [] if name not in {*KNOWN, "none"}]:
        raise CommandError(Failure.USAGE, f"{unknown[0]!r} is no bench; there are {', '.join(KNOWN)}")
    if missing := [path for path in args.trace or [] if not path.is_file()]:
        raise CommandError(Failure.USAGE, f"--trace {missing[0]} is no file")
    contexts = collect.QUICK_CONTEXTS if args.quick else collect.CONTEXTS
    return collect.Wanted(
        benches=[name for name in args.bench or collect.BENCHES if name != "none"],
        contexts=[tokens for tokens in args.tokens or contexts if tokens != "none"],
        traces=args.trace or (),
        quick=args.quick,
        directory=args.directory,
    )
