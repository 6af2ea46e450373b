"""`kvtierctl stress`: a long context through small tiers, with every byte and every sum of it checked."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from kvtierd.cli.errors import CommandError, Failure
from kvtierd.core.geometry import Geometry
from kvtierd.core.units import parse_bytes

EXIT_FOUND = 1
PRESETS = ("llama-3.1-8b", "smollm2", "custom")


def _tokens(text: str) -> int:
    from kvtierd.stress.options import parse_tokens  # what it imports is wanted by no other command

    try:
        return parse_tokens(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("--tokens", type=_tokens, default=0, metavar="N", help="length of the context (1M; with --quick 128k)")
    add("--geometry", choices=PRESETS, default=PRESETS[0], help="shape of the model's KV (%(default)s)")
    add("--layers", type=int, default=0, metavar="N", help="layers of it (2)")
    add("--gpu", type=_bytes, default=-1, metavar="BYTES", help="budget of the gpu tier (256M; with --quick 32M)")
    add("--host", type=_bytes, default=0, metavar="BYTES", help="budget of the host tier (1G; with --quick 128M)")
    add("--nvme", type=Path, metavar="DIR", help="folder on the disk to use (that of temporary files)")
    add("--endpoint", default="", metavar="E", help="use the daemon there, as it is configured, and start none")
    add("--clients", type=int, default=2, metavar="N", help="client processes (%(default)s)")
    add("--fp8", action="store_true", help="allow loss: cold blocks go through FP8, checked to the bit as well")
    add("--chaos", action="store_true", help="kill clients and the daemon and let the disk fail, and check on")
    add("--seed", type=int, default=1, metavar="S", help="of contents, choices and faults (%(default)s)")
    add("--quick", action="store_true", help="128k tokens in smaller tiers: under a minute")
    add("--json", action="store_true", help="one JSON object in place of the table")
    add("--bench", action="store_true", help="rows as `kvtierctl bench --json` has them, one JSON object a line")
    custom = parser.add_argument_group("with --geometry custom")
    for name, default, what in (
        ("--block-size", 128, "tokens a block"),
        ("--kv-heads", 8, "KV heads"),
        ("--heads", 0, "query heads (four for each KV head)"),
        ("--k-dim", 128, "elements of a key of a head"),
        ("--v-dim", 128, "elements of a value of a head"),
    ):
        suffix = "" if "(" in what else " (%(default)s)"
        custom.add_argument(name, type=int, default=default, metavar="N", help=what + suffix)


def run(args: argparse.Namespace) -> int:
    """Run it. Exits 0 where everything held, 1 where something was found, 64 and 69 where it cannot run."""
    # A SIGTERM unwinds too: daemon and clients are stopped and the temporary folder removed.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    from kvtierd.bench.rows import as_json as row_json  # deferred: these load the compiled kernels
    from kvtierd.daemon.embedded import EmbeddedDaemonError
    from kvtierd.stress import table
    from kvtierd.stress.processes import StressError
    from kvtierd.stress.run import run_stress

    try:
        found = run_stress(_options(args), sys.stderr)
    except ValueError as error:
        raise CommandError(Failure.USAGE, str(error)) from error
    except (StressError, EmbeddedDaemonError) as error:
        raise CommandError(Failure.UNAVAILABLE, str(error)) from error
    if args.bench:
        print("\n".join(map(row_json, table.rows(found))))
    elif args.json:
        print(table.as_json(found, shlex.join(["kvtierctl", *sys.argv[1:]])))
    else:
        print(table.as_text(found))
    return 0 if found.passed else EXIT_FOUND


def _options(args: argparse.Namespace) -> Any:
    from kvtierd.stress.options import Options

    shape = None
    if args.geometry == "custom":
        shape = Geometry(block_size=args.block_size, layers=args.layers or 2, kv_heads=args.kv_heads,
                         k_dim=args.k_dim, v_dim=args.v_dim)  # fmt: skip
    return Options(
        tokens=args.tokens,
        geometry=args.geometry,
        shape=shape,
        heads=args.heads,
        layers=args.layers,
        gpu_bytes=args.gpu,
        host_bytes=args.host,
        nvme=args.nvme,
        endpoint=args.endpoint,
        clients=args.clients,
        fp8=args.fp8,
        chaos=args.chaos,
        seed=args.seed,
        quick=args.quick,
    )
