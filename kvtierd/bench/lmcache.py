"""`kvtierctl bench lmcache`: LMCache's own L2 bench on our adapter and on its `fs` adapter, in turns.

What is compared: `lmcache bench l2` as it comes, objects of 2 MiB, every byte of the last round compared by it. Each
run is a process of its own with fresh buffers; ours asks a daemon with an nvme tier, and `fs` writes files beside it.
Both end a store before the bytes are on the disk, and both load from memory: ours verifies checksums, `fs` has none. It
wants LMCache's `lmcache` in the PATH or at $KVTIERD_LMCACHE, with what the client needs in the same environment.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kvtierd
from kvtierd.bench.options import Options, need_memory
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.bench.workload import TIMEOUT_S, await_memory
from kvtierd.core.units import GIB, MIB
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.protocol.client import Client

PROGRAM = "KVTIERD_LMCACHE"
OBJECT_BYTES = 2 * MIB
BATCH, IN_FLIGHT, ROUNDS = 64, 2, 4
_REFERENCE = "LMCache's fs adapter"
_RUN_S = 300


def rows(options: Options) -> Iterator[Row]:
    """Rates of whole runs, the medians of some in turns."""
    program = find_program()
    moved = BATCH * IN_FLIGHT * OBJECT_BYTES * (ROUNDS + 1)
    host_bytes = options.rounds(3, 1) * moved + GIB
    need_memory(host_bytes + 2 * moved + GIB)
    with tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=options.directory) as folder:
        ours, theirs = [], []
        settings = {"host__capacity": host_bytes, "gpu__capacity": 0, "nvme__capacity": host_bytes + 2 * GIB}
        with EmbeddedDaemon(Path(folder) / "d", **settings) as daemon:
            with Client(daemon.endpoint, timeout_s=TIMEOUT_S) as client:
                await_memory(client)
            for number in range(options.rounds(3, 1)):
                ours.append(run(program, plugin(daemon.endpoint, f"run {number}")))
                files = Path(folder) / f"fs{number}"
                theirs.append(run(program, {"type": "fs", "base_path": str(files)}))
                shutil.rmtree(files)
        for operation, goal in (("store", ">= 1.5"), ("load", ">= 1.5"), ("lookup", "")):
            yield _row(operation, ours, theirs, goal)


def find_program() -> str:
    """LMCache's program. Raises BenchError where there is none."""
    named = os.environ.get(PROGRAM)
    program = shutil.which(named or "lmcache")
    if program is None:
        where = f"${PROGRAM} names {named}, which is no program" if named else "no `lmcache` in the PATH"
        raise BenchError(
            f"NOT AVAILABLE: {where}; pip install lmcache==0.5.6 kvtierd, and name its `lmcache` in ${PROGRAM}"
        )
    return program


def plugin(endpoint: str, salt: str) -> dict[str, Any]:
    """LMCache's specification of our adapter. Runs with another salt share no object."""
    return {
        "type": "plugin",
        "module_path": "kvtierd.connectors.lmcache",
        "class_name": "KvtierdL2Adapter",
        "adapter_params": {"endpoint": endpoint, "tenant_salt": salt, "lookup_timeout_ms": 2000},
    }


def run(program: str, adapter: Mapping[str, Any]) -> dict[str, float]:
    """One run of its bench: bytes a second of `store` and `load`, keys a second of `lookup`, medians of its rounds.

    Raises BenchError where it fails, misses an object, or finds bytes that differ.
    """
    size = ["--num-keys", str(BATCH), "--data-size-kb", str(OBJECT_BYTES // 1024), "--in-flight", str(IN_FLIGHT)]
    rounds = ["--rounds", str(ROUNDS), "--l1-align-bytes", "4096", "--lookup-max-hit-rate", "1.0"]
    command = [program, "bench", "l2", "--l2-adapter", json.dumps(adapter), *size, *rounds, "--no-skip-verify"]
    paths = os.pathsep.join(filter(None, (str(Path(kvtierd.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "LMCACHE_DISABLE_BANNER": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [*command, "--format", "json"], env=environment, capture_output=True, text=True, timeout=_RUN_S, check=False
    )
    if done.returncode or f"All {BATCH * IN_FLIGHT} keys data verified OK" not in done.stdout:
        raise BenchError(f"lmcache bench l2 failed on {adapter['type']}: {(done.stdout + done.stderr)[-1000:]}")
    return dict(_figures(done.stdout, str(adapter["type"])))


def _figures(output: str, kind: str) -> Iterator[tuple[str, float]]:
    result, _ = json.JSONDecoder().raw_decode(output, output.index('{\n  "title"'))
    for name, figures in result["metrics"].items():
        if not name.startswith("op_"):
            continue
        operation = figures["operation"].lower()
        if figures["total_success"] != figures["total_keys"]:
            raise BenchError(f"{kind}: {operation} did {figures['total_success']} of {figures['total_keys']} objects")
        seconds = figures["duration_p50_ms"] / 1e3
        yield operation, figures["keys_per_round"] * (1 if operation == "lookup" else OBJECT_BYTES) / seconds


def _row(operation: str, ours: list[dict[str, float]], theirs: list[dict[str, float]], goal: str) -> Row:
    scale, unit = (1e3, "k keys/s") if operation == "lookup" else (1e9, "GB/s")
    value, reference = (statistics.median(run[operation] for run in runs) / scale for runs in (ours, theirs))
    name = f"{operation} of {BATCH * IN_FLIGHT} objects of 2 MiB" if unit == "GB/s" else f"{operation}s"
    return make_row("lmcache", name, value, unit, reference=reference, reference_name=_REFERENCE, goal=goal)
