"""`kvtierd`: the foreground daemon."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from kvtierd import __version__
from kvtierd.config.options import add_options
from kvtierd.config.schema import Settings
from kvtierd.core.errors import ExitCode, StartupError, StorageError
from kvtierd.daemon.file_limit import raise_file_limit
from kvtierd.telemetry import log
from kvtierd.telemetry.notify import extend_timeout, notify_status

if TYPE_CHECKING:
    from kvtierd.config.loader import Loaded
    from kvtierd.daemon.app import Compose

EXTRA = frozenset({"aiofiles", "numba", "yaml"})
"""What the extra `daemon` adds; without it only the client is installed."""

THREADING = {
    "OPENBLAS_NUM_THREADS": "1",  # NumPy's BLAS is never called here, but would start a thread per CPU
    "OMP_WAIT_POLICY": "passive",  # idle threads of parallel kernels sleep and leave the CPUs to the engine
}
"""Read by libraries when they are loaded; what the environment says already is the operator's word."""

STDERR_FD = 2
INTERRUPTED = 128 + signal.SIGINT

COMPILE_S = 120.0
"""More than any one module takes to compile."""

UMASK = 0o027
"""What the daemon makes is for itself and its group; nobody else may read a tenant's blocks."""

logger = logging.getLogger("kvtierd.daemon")  # __name__ is __main__ under `python -m`


class _Parser(argparse.ArgumentParser):
    """argparse exits with 2; sysexits.h has 64 for a command used wrongly."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(ExitCode.USAGE, f"{self.prog}: {message}\n")


SWITCH_S = 0.0005
"""How long a thread that wants to run Python waits for the one that does: a read that could be begun waits as long for
a loop that is busy. Python's default is ten times as much."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the daemon until it is told to stop; returns the exit code (kvtierd.core.errors.ExitCode)."""
    # Where every thread stood when a watchdog's SIGABRT, or a crash in a library, came; before any library is loaded.
    faulthandler.enable(STDERR_FD)
    args = build_parser().parse_args(argv)
    try:
        return _main(args)
    except KeyboardInterrupt:  # before the loop had its signal handlers
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        sys.stderr.write(f"kvtierd: {error.name} is not installed; the daemon needs: pip install 'kvtierd[daemon]'\n")
        return ExitCode.NO_DEVICE


def _main(args: argparse.Namespace) -> int:
    # Deferred, as all that needs the extra: the message above must be able to say so.
    from kvtierd.config.loader import ConfigError, load
    from kvtierd.config.render import render

    def read() -> Loaded:
        return load(config=args.config, options=args.options, environment=os.environ)

    try:
        loaded = read()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    if args.check_config:
        sys.stdout.write("the configuration is valid\n")
        return ExitCode.OK
    if args.print_config:
        sys.stdout.write(render(loaded))
        return ExitCode.OK
    log.configure(loaded.settings.log.level, loaded.settings.log.format)
    if warning := raise_file_limit(loaded.settings):
        logger.warning("%s", warning)
    return _run(loaded.settings, read, args)


def _run(settings: Settings, reread: Callable[[], Loaded], args: argparse.Namespace) -> int:
    from kvtierd.daemon.app import run

    os.umask(UMASK)
    sys.setswitchinterval(SWITCH_S)
    try:
        asyncio.run(run(settings, _load, reread=reread, ready_fd=args.ready_fd, stop_fd=args.stop_fd))
    except StartupError as error:
        logger.error("%s", error)
        return error.exit_code
    except StorageError as error:
        logger.error("%s", error)
        return ExitCode.IO
    except Exception:
        logger.exception("this is a bug in kvtierd; please report it")
        return ExitCode.BUG
    return ExitCode.OK


def _load(settings: Settings) -> Compose:
    """Load all code. The first import of a kernel fixes the cache's folder, so that must be chosen before."""
    for name, value in THREADING.items():
        os.environ.setdefault(name, value)
    from kvtierd.daemon.compiler_memory import give_back_compiler
    from kvtierd.daemon.kernels import choose_cache, load_kernels

    cache = choose_cache(settings.cache_dir)
    logger.info("kernels loaded in %.2f s; %s", load_kernels(_tell_loading), cache.note)
    give_back_compiler()
    from kvtierd.daemon.composition import compose
    from kvtierd.tiers.later_kernels import after_loading

    after_loading(give_back_compiler)
    return compose


def _tell_loading(done: int, total: int) -> None:
    """Compiling takes a minute or two where the cache is empty: the service manager must know that it goes on."""
    notify_status(f"loading compiled code, {done} of {total} modules")
    extend_timeout(COMPILE_S)


def build_parser() -> argparse.ArgumentParser:
    """What the command line may say; the manual page is made of it too."""
    parser = _Parser(prog="kvtierd", description="Keeps the KV cache of inference engines in three tiers.")
    add_options(parser)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--check-config", action="store_true", help="report every mistake; exit 78 if there is one")
    group.add_argument("--print-config", action="store_true", help="print every value with its origin")
    parser.add_argument("--version", action="version", version=f"kvtierd {__version__}")
    parser.add_argument(
        "--ready-fd", type=_open_fd, default=-1, metavar="N", help="write one JSON line there when ready"
    )
    parser.add_argument("--stop-fd", type=_open_fd, default=-1, metavar="N", help="stop when this pipe is closed")
    return parser


def _open_fd(text: str) -> int:
    try:
        os.fstat(int(text))
    except (ValueError, OverflowError, OSError):
        raise argparse.ArgumentTypeError(f"{text!r} is not an open file descriptor") from None
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
