"""`kvtierctl report`: the benches and the stress as one page with plots, and as BENCHMARKS.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvtierd.cli.errors import CommandError, Failure

EXIT_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("files", nargs="*", type=Path, metavar="FILE", help="recorded figures; without any, everything is run now")
    add("--output", type=Path, default=Path("report.html"), metavar="PATH", help="the page (%(default)s)")
    add("--markdown", type=Path, metavar="PATH", help="write the same figures as Markdown")
    add("--save", type=Path, metavar="PATH", help="add what is run now to a recording, to make a page of it again")
    add("--bench", action="append", metavar="NAME", help="run this bench only; may be given several times, or none")
    add("--tokens", action="append", metavar="N", help="run the stress over so many tokens; several times, or none")
    add("--quick", action="store_true", help="quick benches, and the stress up to 128k tokens")
    add("--directory", type=Path, metavar="DIR", help="where temporary stores lie (the disk to measure)")


def run(args: argparse.Namespace) -> int:
    """Collect or read, then write. Exits 1 where a bench or the stress could not be run or found something."""
    from kvtierd.bench.catalogue import BENCHES as KNOWN  # deferred: these load what only they want
    from kvtierd.report import collect
    from kvtierd.report.markdown import as_markdown
    from kvtierd.report.page import as_html
    from kvtierd.report.records import Record, as_line, read_records
    from kvtierd.report.sections import sections

    if unknown := [name for name in args.bench or [] if name not in {*KNOWN, "none"}]:
        raise CommandError(Failure.USAGE, f"{unknown[0]!r} is no bench; there are {', '.join(KNOWN)}")
    records: list[Record] = read_records(args.files)
    if not args.files:
        contexts = collect.QUICK_CONTEXTS if args.quick else collect.CONTEXTS
        benches = [name for name in args.bench or collect.BENCHES if name != "none"]
        lengths = [tokens for tokens in args.tokens or contexts if tokens != "none"]
        for record in collect.collect(benches, lengths, quick=args.quick, directory=args.directory):
            print(f"{record.command}: {record.failed or f'{len(record.rows)} figures'}", file=sys.stderr)
            records.append(record)
            if args.save is not None:
                with args.save.open("a") as file:
                    file.write(as_line(record) + "\n")
    try:
        args.output.write_text(as_html(records, sections(records)))
        if args.markdown is not None:
            args.markdown.write_text(as_markdown(records))
    except OSError as error:
        raise CommandError(Failure.USAGE, f"{error.filename}: {error.strerror}") from error
    print(args.output)
    bad = [record for record in records if record.failed or (record.stress and record.stress.verdict != "pass")]
    return EXIT_FAILED if bad else 0
