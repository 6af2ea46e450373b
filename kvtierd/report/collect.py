"""Runs the benches and the stress, each in a process of its own, and records what they print.

A run of everything takes an hour or more. It may be done in pieces: what a recording has already is left out, and
nothing begins after a given time.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvtierd.bench.catalogue import PARTS
from kvtierd.bench.rows import Row
from kvtierd.report.machine import describe
from kvtierd.report.records import Record, from_stress
from kvtierd.stress.options import parse_tokens

BENCHES = ("host", "nvme", "protocol", "index", "recovery", "space", "attend", "memory", "naive", "sweep", "start",
           "trace", "peers")  # fmt: skip
"""What a report asks for by default; `trace` draws its own curves, `peers` needs peers installed."""
CONTEXTS = ("8k", "32k", "128k", "512k", "1M")
QUICK_CONTEXTS = ("8k", "32k", "128k")
TIMEOUT_S = 3600
AGAIN_S = 180
"""Of one run of a recording that is measured again: none takes the time of all others."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a report asks for: benches by name, and the stress at these lengths of context.

    `traces` are files that the bench of that name replays, one run each; without any it replays synthetic ones.
    """

    benches: Sequence[str]
    contexts: Sequence[str]
    traces: Sequence[Path] = ()
    quick: bool = False
    directory: Path | None = None

    def runs(self) -> Iterator[Run]:
        """In order: benches, then the stress."""
        for name in self.benches:
            for trace in self.traces if name == "trace" and self.traces else [None]:
                for part in PARTS.get(name, ("",)):
                    yield Run(name=name, part=part, trace=trace, quick=self.quick, directory=self.directory)
        for tokens in self.contexts:
            yield Run(name="stress", tokens=tokens, directory=self.directory)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One command: a bench, or a part of one that has parts, or the stress over `tokens`."""

    name: str
    part: str = ""
    tokens: str = ""
    trace: Path | None = None
    quick: bool = False
    directory: Path | None = None

    @property
    def command(self) -> str:
        """As a record names it: without folders of this machine."""
        trace = [self.trace.name] if self.trace is not None else []
        return shlex.join(["kvtierctl", *self._words(trace)])

    def __call__(self, timeout_s: float = TIMEOUT_S) -> Record:
        """Run it; one that fails says why, and one that takes longer is ended."""
        machine = describe()
        return self._stress(machine, timeout_s) if self.tokens else self._bench(machine, timeout_s)

    def _words(self, trace: Sequence[str]) -> list[str]:
        if self.tokens:
            return ["stress", "--json", "--tokens", self.tokens, "--gpu", "32M", "--host", "128M"]
        part = ["--only", self.part] if self.part else []
        return ["bench", self.name, *trace, *part, "--json", *(["--quick"] if self.quick else [])]

    def _bench(self, machine: str, timeout_s: float) -> Record:
        with tempfile.TemporaryDirectory(prefix="kvtierd-report-") as folder:
            plot = Path(folder) / "plot.svg"
            words = self._words([str(self.trace)] if self.trace is not None else [])
            words += ["--plot", str(plot)] if self.name == "trace" else []
            words += ["--directory", str(self.directory)] if self.directory is not None else []
            ended = _run(words, timeout_s)
            rows = [msgspec.json.decode(line, type=Row) for line in ended.stdout.splitlines() if line.startswith("{")]
            return Record(
                command=self.command,
                machine=machine,
                recorded=_now(),
                rows=rows,
                svg=plot.read_text() if plot.exists() else "",
                failed=_failure(ended) if ended.returncode else "",
            )

    def _stress(self, machine: str, timeout_s: float) -> Record:
        extra = ["--nvme", str(self.directory)] if self.directory is not None else []
        ended = _run([*self._words([]), *extra], timeout_s)
        lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
        if not lines:
            return Record(command=self.command, machine=machine, recorded=_now(), failed=_failure(ended))
        return from_stress({**json.loads(lines[-1]), "command": self.command}, machine, _now())


def collect(wanted: Wanted, recorded: Sequence[Record] = (), end_s: float = math.inf) -> Iterator[Record | None]:
    """A record of each run that is not `recorded` whole; None in place of one that would begin after `end_s`
    (CLOCK_MONOTONIC)."""
    done = {record.command for record in recorded if not record.failed}
    for run in wanted.runs():
        if run.command not in done:
            yield run() if time.monotonic() < end_s else None


def again(
    records: Sequence[Record], more: Iterable[Run] = (), directory: Path | None = None
) -> tuple[list[Run], list[str]]:
    """The commands of a recording and `more`, to be run anew, the longest last; and those that cannot be: traces, whose
    files a recording does not have, and what no report runs."""
    runs: list[Run] = []
    others: list[str] = []
    for command in dict.fromkeys(record.command for record in records):
        run = _named(command, directory)
        runs.append(run) if run is not None else others.append(command)
    known = {run.command for run in runs}
    runs += [run for run in more if run.command not in known]
    return sorted(runs, key=lambda run: parse_tokens(run.tokens) if run.tokens else 0), others


def _named(command: str, directory: Path | None) -> Run | None:
    """The run that a record names so."""
    # Only what this module names is run, and that is words without quotes.
    match command.split():
        case ["kvtierctl", "stress", "--json", "--tokens", tokens, *_]:
            run = Run(name="stress", tokens=tokens, directory=directory)
        case ["kvtierctl", "bench", name, *words]:
            part = words[words.index("--only") + 1] if "--only" in words else ""
            run = Run(name=name, part=part, quick="--quick" in words, directory=directory)
        case _:
            return None
    return run if run.command == command else None


def renew(runs: Sequence[Run], end_s: float) -> Iterator[Record]:
    """A record of each run, as long as there is time (CLOCK_MONOTONIC); one that is not over by then, or in AGAIN_S, is
    ended."""
    for run in runs:
        if (left_s := end_s - time.monotonic()) <= 0:
            return
        yield run(min(AGAIN_S, round(left_s, 1)))


def _run(words: Sequence[str], timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    # The child must find this very package, also where it runs uninstalled from another folder.
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, *_program(words)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        # To files, so that the rows which one that takes too long has printed are not lost.
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=errors)
        try:
            code, late = process.wait(timeout_s), ""
        except subprocess.TimeoutExpired:
            process.terminate()
            code, late = process.wait(), f"ended after {timeout_s:g} s\n"
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command, code, output.read(), errors.read() + late)


def _program(words: Sequence[str]) -> list[str]:
    return ["-m", "kvtierd.cli.main", *words]


def _failure(ended: subprocess.CompletedProcess[str]) -> str:
    last = ended.stderr.strip().splitlines()[-1:]
    return f"it ended with {ended.returncode}: {' '.join(last)}"


def _now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%d")
