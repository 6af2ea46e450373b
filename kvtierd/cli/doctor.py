"""`kvtierctl doctor`: looks at this machine and its configuration, and says what is wrong and what to do.

It checks what the daemon will need (or needs now, if it runs): permissions, limits, memory, the disk and how bytes
reach it, the GPU, where things are placed, the clock, and measures the speed of each hop. Run it as the daemon's user
or as root. Exit code 0: nothing is broken; 1: something is, or with --strict something could be better.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from kvtierd.cli import doctor_checks, doctor_disk, doctor_speeds, output
from kvtierd.cli.finding import Finding, Verdict, failed
from kvtierd.config.loader import ConfigError, load
from kvtierd.config.options import add_options
from kvtierd.config.schema import Settings

EXIT_BROKEN = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The daemon's own options choose its configuration."""
    add_options(parser)
    output.add_arguments(parser)
    parser.add_argument("--no-speeds", action="store_true", help="do not measure (it takes seconds and writes 64 MiB)")
    parser.add_argument("--strict", action="store_true", help="exit 1 for what could be better, too")


def run(args: argparse.Namespace) -> int:
    """Print a line for each finding."""
    found: list[Finding] = []
    for finding in findings(args):
        found.append(finding)
        if args.format == "text":
            output.say(args, text_of(finding), None)
    count = {verdict: sum(finding.verdict is verdict for finding in found) for verdict in Verdict}
    broken, worse = count[Verdict.FAIL], count[Verdict.WARN]
    if args.format == "json":
        rows: list[dict[str, Any]] = [dataclasses.asdict(finding) for finding in found]
        output.say(args, "", {"findings": rows, "failed": broken, "warnings": worse})
    else:
        output.say(args, f"{len(found)} checks: {broken} failed, {worse} could be better", None)
    return EXIT_BROKEN if broken or (args.strict and worse) else 0


def findings(args: argparse.Namespace) -> Iterator[Finding]:
    """Every check in turn. One that cannot look says so and does not stop the others."""
    try:
        settings = load(config=args.config, options=args.options, environment=os.environ).settings
        yield Finding("configuration", Verdict.OK, "has no mistakes")
    except ConfigError as error:
        yield Finding("configuration", Verdict.FAIL, str(error), "kvtierd --check-config lists the mistakes")
        settings = Settings()
    checks = [*doctor_checks.CHECKS, *doctor_disk.CHECKS, *(() if args.no_speeds else doctor_speeds.CHECKS)]
    for name, check in checks:
        try:
            yield from check(settings)
        except OSError as error:
            yield failed(name, error)


def text_of(finding: Finding) -> str:
    """One finding as people read it."""
    advice = f"\n{'':28}{finding.advice}" if finding.advice else ""
    return f"{finding.verdict.value:<5} {finding.name:<20}  {finding.text}{advice}"
