"""The stress from start to verdict: a daemon, clients, and phases in which everything that comes back is checked."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TextIO

from kvtierd.core.errors import KvtierdError
from kvtierd.core.units import format_bytes
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.stress import attending, loading, reading, storing
from kvtierd.stress.options import Options
from kvtierd.stress.processes import StressError, child_environment
from kvtierd.stress.rig import Found, Rig

PHASES: dict[str, Callable[[Rig], None]] = {
    "ceilings": storing.measure_ceilings,
    "ingest": storing.ingest,
    "sample": reading.sample,
    "verify": reading.verify,
    "hot": reading.hot,
    "decode": attending.decode,
    "mixed": loading.mixed,
    "chaos": loading.chaos,
}
"""In their order; the last one only where it is asked for."""


def run_stress(options: Options, out: TextIO, phases: Collection[str] = tuple(PHASES)) -> Found:
    """Run on a daemon of one's own, or on the one at `options.endpoint`. Raises StressError where it cannot begin.

    `phases` are all, or some that a bench wants.
    """
    base = options.nvme
    if base is not None and not base.is_dir():
        raise StressError(f"--nvme {base} is no folder")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with tempfile.TemporaryDirectory(prefix="kvtierd-stress-", dir=base) as name:
        folder = Path(name)
        options.check(folder)
        if options.endpoint:
            return _run(options, folder, out, options.endpoint, None, phases)
        _precompile()
        with EmbeddedDaemon(folder, **options.settings(folder)) as daemon:
            found = _run(options, folder, out, daemon.endpoint, daemon, phases)
            if not found.passed:
                found.counts["daemon_log"] = daemon.logs().splitlines()[-30:]
            return found


def _precompile() -> None:
    """As an installation does: a daemon that has to compile keeps the compiler's memory, some 300 MiB."""
    command = [sys.executable, "-P", "-m", "kvtierd.cli.main", "precompile", "--config", os.devnull]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise StressError(f"the kernels could not be compiled: {done.stderr.strip()}")


def _run(
    options: Options, folder: Path, out: TextIO, endpoint: str, daemon: EmbeddedDaemon | None, phases: Collection[str]
) -> Found:
    """All phases. What cannot go on is a finding too."""
    with contextlib.closing(Rig(options, folder, out, endpoint, daemon)) as rig:
        for name, phase in PHASES.items():
            if name not in phases or (name == "chaos" and not options.chaos):
                continue
            begin_s = time.monotonic()
            try:
                phase(rig)
            except KvtierdError as error:
                rig.found.ended_at = name
                rig.found.findings.append(f"{name}: {type(error).__name__}: {error}")
                break
            finally:
                rig.found.counts.setdefault("seconds", {})[name] = time.monotonic() - begin_s
        _weigh(rig)
        return rig.found


def _weigh(rig: Rig) -> None:
    figures = rig.found.figures
    figures["memory_peak"], figures["memory_budget"] = rig.watch.peak_bytes, rig.watch.budget_bytes
    rig.found.counts["memory_peak_phase"] = rig.watch.peak_phase
    rig.found.counts["memory_peak_parts"] = rig.watch.peak_parts
    if rig.watch.peak_bytes > rig.watch.budget_bytes:
        rig.found.findings.append(
            f"memory: daemon and clients took {format_bytes(rig.watch.peak_bytes)} in phase "
            f"{rig.watch.peak_phase}; "
            f"{format_bytes(rig.watch.budget_bytes)} are allowed"
        )
