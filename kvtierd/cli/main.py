"""`kvtierctl`: finds the command's file, reads its arguments, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol

from kvtierd import __version__
from kvtierd.cli.errors import CommandError
from kvtierd.core.errors import ExitCode, KvtierdError, StartupError

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """One command: the module that holds it, imported only when it runs, and what it does."""

    module: str
    summary: str


COMMANDS = {
    "ping": Command("kvtierd.cli.ping", "ask whether the daemon answers, and how fast"),
    "stat": Command("kvtierd.cli.stat", "show the daemon's counters and gauges"),
    "info": Command("kvtierd.cli.info", "show the daemon's state in sections"),
    "top": Command("kvtierd.cli.top", "show what the daemon does now, refreshed"),
    "watch": Command("kvtierd.cli.watch", "show requests and blocks as they come and go"),
    "slowlog": Command("kvtierd.cli.slowlog", "show requests that took long"),
    "namespaces": Command("kvtierd.cli.namespaces", "show what the blocks belong to"),
    "tenants": Command("kvtierd.cli.tenants", "show who is served, what each has, and its quotas"),
    "blocks": Command("kvtierd.cli.blocks", "show blocks, where they are and when they were used"),
    "pin": Command("kvtierd.cli.pin", "hold blocks in host"),
    "evict": Command("kvtierd.cli.evict", "drop copies of blocks in gpu or host"),
    "purge": Command("kvtierd.cli.purge", "forget blocks for good: of a tenant, a namespace, or an age"),
    "flush": Command("kvtierd.cli.flush", "wait until everything committed is on stable storage"),
    "drain": Command("kvtierd.cli.drain", "take no more stores and write what is dirty"),
    "doctor": Command("kvtierd.cli.doctor", "check this machine and say what to do"),
    "demo": Command("kvtierd.cli.demo", "show a real model's KV going through all tiers and a restart"),
    "check": Command("kvtierd.cli.check", "check a store offline, and repair it"),
    "dump": Command("kvtierd.cli.dump", "show the records of a segment file"),
    "stress": Command("kvtierd.cli.stress", "put a long context through small tiers and check every byte of it"),
    "bench": Command("kvtierd.cli.bench", "measure a figure against its reference"),
    "report": Command("kvtierd.cli.report", "make a page with plots of what benches and the stress measure"),
    "precompile": Command("kvtierd.cli.precompile", "compile all kernels into the cache folder"),
    "keygen": Command("kvtierd.cli.keygen", "make a CURVE key pair, for clients of other machines"),
    "systemd": Command("kvtierd.cli.systemd", "put the service's files in place, or remove them"),
    "man": Command("kvtierd.cli.man", "print a manual page"),
    "completion": Command("kvtierd.cli.completion", "print completion for a shell"),
    "kernels": Command("kvtierd.cli.kernels", "compile the CUDA kernels without a GPU; show registers and spills"),
}


EXTRA = frozenset({"aiofiles", "numba", "yaml"})
"""What the extra `daemon` adds: a few commands look into the daemon and not only talk to it."""


class CommandModule(Protocol):
    """What the file of a command defines."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare its arguments."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it; returns the exit code, raises KvtierdError for what the user can mend."""
        ...


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(ExitCode.USAGE, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if not word.startswith("-")), "")
    try:
        args = _parser(chosen).parse_args(words)
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        return _without_extra(error)
    module: CommandModule = importlib.import_module(COMMANDS[args.command].module)
    try:
        return module.run(args)
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        return _without_extra(error)
    except KvtierdError as error:
        sys.stderr.write(f"kvtierctl {args.command}: {error}\n")
        return _exit_code(error)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return _without_output(error, args.command)


def _without_output(error: OSError, command: str) -> int:
    if not isinstance(error, BrokenPipeError) and error.errno not in DISK_FULL:
        raise error
    # What is still in the buffer goes nowhere: flushing at exit must not find the error once more.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):  # whoever read our output has gone (`| head`): that is no error
        return ExitCode.OK
    sys.stderr.write(f"kvtierctl {command}: {error.strerror}\n")
    return ExitCode.IO


def _without_extra(error: ModuleNotFoundError) -> int:
    sys.stderr.write(f"kvtierctl: {error.name} is not installed; this command needs: pip install 'kvtierd[daemon]'\n")
    return ExitCode.NO_DEVICE


def command_parser(name: str) -> argparse.ArgumentParser:
    """The parser of one command, as `kvtierctl NAME` uses it; whoever documents the command reads it too."""
    command = COMMANDS[name]
    parser = _Parser(prog=f"kvtierctl {name}", description=f"{command.summary.capitalize()}.")
    module: CommandModule = importlib.import_module(command.module)
    module.add_arguments(parser)
    return parser


def _exit_code(error: KvtierdError) -> int:
    match error:
        case CommandError() | StartupError():
            return error.exit_code
        case _:
            return 1


def _parser(chosen: str) -> argparse.ArgumentParser:
    """A parser that knows all commands by name, and the arguments of the chosen one."""
    parser = _Parser(prog="kvtierctl", description="Talks to kvtierd, the KV cache daemon.")
    parser.add_argument("--version", action="version", version=f"kvtierctl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.summary, description=f"{command.summary.capitalize()}.")
        if name == chosen:
            module: CommandModule = importlib.import_module(command.module)
            module.add_arguments(sub)
    return parser


if __name__ == "__main__":
    sys.exit(main())
