"""Runs the benches and the stress, each in a process of its own, and records what they print."""

from __future__ import annotations

import datetime as dt
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kvtierd.bench.rows import Row
from kvtierd.report.machine import describe
from kvtierd.report.records import Record, from_stress

BENCHES = ("host", "nvme", "protocol", "index", "recovery", "space", "attend", "memory", "naive", "start", "trace",
           "peers")  # fmt: skip
"""What a report asks for by default; `trace` draws its own curves, `peers` needs peers installed."""
CONTEXTS = ("8k", "32k", "128k", "512k", "1M")
QUICK_CONTEXTS = ("8k", "32k", "128k")
TIMEOUT_S = 3600


def collect(
    benches: Sequence[str], contexts: Sequence[str], *, quick: bool, directory: Path | None
) -> Iterator[Record]:
    """A record of each bench, then of the stress at each length of context; one that fails says why and stops none."""
    for name in benches:
        yield _bench(name, quick=quick, directory=directory)
    for tokens in contexts:
        yield _stress(tokens, directory=directory)


def _bench(name: str, *, quick: bool, directory: Path | None) -> Record:
    words = ["bench", name, "--json", *(["--quick"] if quick else [])]
    with tempfile.TemporaryDirectory(prefix="kvtierd-report-") as folder:
        plot = Path(folder) / "plot.svg"
        extra = ["--plot", str(plot)] if name == "trace" else []
        extra += ["--directory", str(directory)] if directory is not None else []
        machine = describe()
        ended = _run([*words, *extra])
        rows = [msgspec.json.decode(line, type=Row) for line in ended.stdout.splitlines() if line.startswith("{")]
        return Record(
            command=_named(words),
            machine=machine,
            recorded=_now(),
            rows=rows,
            svg=plot.read_text() if plot.exists() else "",
            failed=_failure(ended) if ended.returncode else "",
        )


def _stress(tokens: str, *, directory: Path | None) -> Record:
    words = ["stress", "--json", "--tokens", tokens, "--gpu", "32M", "--host", "128M"]
    extra = ["--nvme", str(directory)] if directory is not None else []
    machine = describe()
    ended = _run([*words, *extra])
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return Record(command=_named(words), machine=machine, recorded=_now(), failed=_failure(ended))
    told = json.loads(lines[-1])
    return from_stress({**told, "command": _named(words)}, machine, _now())


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # The child must find this very package, also where it runs uninstalled from another folder.
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", "kvtierd.cli.main", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def _failure(ended: subprocess.CompletedProcess[str]) -> str:
    last = ended.stderr.strip().splitlines()[-1:]
    return f"it ended with {ended.returncode}: {' '.join(last)}"


def _named(words: Sequence[str]) -> str:
    return shlex.join(["kvtierctl", *words])


def _now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%d")
