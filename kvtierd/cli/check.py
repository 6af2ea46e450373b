"""`kvtierctl check DIR`: the offline check of a store."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from kvtierd.core.units import format_bytes
from kvtierd.storage.checker import Finding, Report, Verdict, check_store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The store and what may be done to it."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "exit codes: 0 clean, 1 all problems were repaired, 4 problems are left, 74 the disk, 75 in use"
    parser.add_argument("directory", type=Path, metavar="DIR", help="nvme.directory of a daemon that does not run")
    parser.add_argument("--repair", action="store_true", help="mend what can be mended; blocks are never changed")
    parser.add_argument("--verify-data", action="store_true", help="read every block and verify its checksums")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def run(args: argparse.Namespace) -> int:
    """Print every finding and the verdict."""
    report = asyncio.run(check_store(args.directory, repair=args.repair, verify_data=args.verify_data))
    for finding in report.findings:
        print(as_json(finding) if args.json else as_text(finding))
    print(summary(report, as_lines=args.json))
    return report.verdict


def as_text(finding: Finding) -> str:
    """One line."""
    kind = "note" if finding.is_note else "repaired" if finding.is_repaired else "problem"
    return f"{kind:<9} {finding.place}: {finding.what}"


def as_json(finding: Finding) -> str:
    """One object."""
    kind = "note" if finding.is_note else "problem"
    return json.dumps({"kind": kind, "place": finding.place, "what": finding.what, "repaired": finding.is_repaired})


def summary(report: Report, *, as_lines: bool) -> str:
    """The last line."""
    verdict = Verdict(report.verdict).name.lower()
    if as_lines:
        counts = ("segments", "live_blocks", "live_bytes", "verified_bytes")
        return json.dumps({"verdict": verdict, **{name: getattr(report, name) for name in counts}})
    verified = f"; {format_bytes(report.verified_bytes)} verified" if report.verified_bytes else ""
    live = f"{report.live_blocks} live blocks, {format_bytes(report.live_bytes)}, no two extents overlap"
    return f"{verdict}: {report.segments} segments, {live}{verified}"
