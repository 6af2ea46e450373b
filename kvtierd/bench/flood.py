"""`kvtierctl bench flood`: what a client that sends garbage and oversized batches at full rate costs another one.

What is compared: the median lookup of 32 keys, one at a time, by the same client of the same daemon, while another
process floods it, and while it is quiet, in turns. The flood waits for nothing; it sends what ZeroMQ takes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvtierd.bench.options import Options
from kvtierd.bench.protocol import LookupLoad
from kvtierd.bench.rounds import alternate
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.bench.workload import daemon_and_client
from kvtierd.core.units import MIB

PATIENCE_S = 60.0
ENOUGH = 1000
"""Messages below which a flood was none."""


def rows(options: Options) -> Iterator[Row]:
    """Measure both medians."""
    settings = {"nvme__directory": "", "host__capacity": 64 * MIB, "gpu__capacity": 0}
    with (
        tempfile.TemporaryDirectory(prefix="kvtierd-bench-") as folder,
        daemon_and_client(Path(folder) / "d", 1, **settings) as (daemon, client),
    ):
        load = LookupLoad(client)
        flooded, quiet = alternate([lambda: _flooded(daemon.endpoint, load), load.round_trip_us], options.rounds(9, 3))
    yield make_row(
        "flood",
        "lookup of 32 keys, median round trip, while another client floods",
        flooded,
        "µs",
        reference=quiet,
        reference_name="the same while it is quiet",
        goal="<= 3",
    )


def _flooded(endpoint: str, load: LookupLoad) -> float:
    with _flooding(endpoint):
        return load.round_trip_us()


@contextlib.contextmanager
def _flooding(endpoint: str) -> Iterator[None]:
    command = [sys.executable, "-m", "kvtierd.bench.flood_client", endpoint]
    # The child must find this very package, also where it runs uninstalled from another folder.
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "floods\n":
            raise BenchError(f"the flood did not begin: exit code {process.wait()}")
        yield
        said, _ = process.communicate("", PATIENCE_S)
    if process.returncode or int(said) < ENOUGH:
        raise BenchError(f"the flood ended with {process.returncode} after {said.strip() or 'no'} messages")
