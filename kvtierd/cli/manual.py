"""Manual pages and shell completion, made of what `--help` shows: one source, so that neither can be out of date."""

from __future__ import annotations

import argparse
import importlib
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

from kvtierd import __version__
from kvtierd.cli.main import COMMANDS, CommandModule, command_parser
from kvtierd.core.errors import ExitCode

MANUALS = {
    "kvtierctl": Path("share/man/man1/kvtierctl.1"),
    "kvtierd": Path("share/man/man8/kvtierd.8"),
    "kvtierd.yaml": Path("share/man/man5/kvtierd.yaml.5"),
}
"""Pages by name, and where they belong below a prefix."""

COMPLETION_TARGET = Path("share/bash-completion/completions/kvtierctl")

EXIT_MEANINGS = {
    ExitCode.OK: "stopped as asked; everything dirty was flushed",
    ExitCode.USAGE: "used wrongly",
    ExitCode.NO_DEVICE: "a device or a package that was asked for is not there",
    ExitCode.BUG: "a bug; the log has it",
    ExitCode.IO: "a folder, a disk or a socket refused",
    ExitCode.LOCKED: "another daemon runs on this folder",
    ExitCode.CONFIG: "the configuration has mistakes; each is named with file and line",
}
SIGNALS = {
    "SIGTERM, SIGINT": "take no more stores, go on serving reads until the dirty backlog is on disk, exit 0. The "
    "backlog is at most the host tier. A second one does not wait for it.",
    "SIGHUP": "read the configuration again and take over what may change; with a mistake in it, change nothing. The "
    "log lists what changed and what needs a restart.",
    "SIGUSR1": "write the state to the log: tasks, threads, every statistic.",
    "SIGABRT": "write to standard error where each thread stands, and end: what systemd's watchdog sends.",
}
FILES = {
    "/etc/kvtierd/kvtierd.yaml, /etc/kvtierd/conf.d/*.yaml": "the configuration, see kvtierd.yaml(5)",
    "/run/kvtierd/TENANT/kvtierd.sock": "the tenant's socket, for its group",
    "/run/kvtierd/admin/kvtierd.sock": "the operators' socket, for root and the daemon's user",
    "/var/lib/kvtierd": "segments of the nvme tier",
    "/var/cache/kvtierd": "compiled kernels",
}


def manual(name: str) -> str:
    """One manual page as roff, by its name in MANUALS."""
    match name:
        case "kvtierctl":
            return _page(name, 1, "talks to kvtierd, the KV cache daemon", _kvtierctl())
        case "kvtierd":
            return _page(name, 8, "keeps the KV cache of inference engines in three tiers", _kvtierd())
        case "kvtierd.yaml":
            return _page(name, 5, "configuration of kvtierd", _configuration())
        case _:
            raise ValueError(f"{name!r} is not a manual page; there are {', '.join(MANUALS)}")


def completion() -> str:
    """Completion for bash: commands first, then the options of the command."""
    cases = "\n".join(
        f"        {name}) words={shlex.quote(' '.join(_words(command_parser(name))))} ;;" for name in COMMANDS
    )
    return f"""\
# bash completion for kvtierctl {__version__}; made by `kvtierctl completion`.
_kvtierctl() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words={shlex.quote(" ".join([*COMMANDS, "--help", "--version"]))}
    [ "$COMP_CWORD" -gt 1 ] && case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _kvtierctl kvtierctl
"""


def _words(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if not action.option_strings and action.choices:
            yield from map(str, action.choices)


def _page(name: str, section: int, purpose: str, body: Iterator[str]) -> str:
    head = [f'.TH "{name.upper()}" {section} "" "kvtierd {__version__}"', ".SH NAME", f"{_text(name)} \\- {purpose}"]
    return "\n".join([*head, *body]) + "\n"


def _kvtierctl() -> Iterator[str]:
    yield from (".SH SYNOPSIS", ".B kvtierctl", "COMMAND [OPTION...]", ".SH COMMANDS")
    for name, command in COMMANDS.items():
        parser = command_parser(name)
        module: CommandModule = importlib.import_module(command.module)
        yield from (f'.SS "{_text(" ".join(parser.format_usage().split()).removeprefix("usage: "))}"',)
        yield _text(f"{command.summary.capitalize()}.")
        if more := " ".join((module.__doc__ or "").partition("\n")[2].split()):
            yield from (".PP", _text(more))
        yield from _options(parser)
    yield ".SH ENVIRONMENT"
    yield from _terms(
        {
            "KVTIERD_ENDPOINT": "the daemon's address, where --endpoint is not given",
            "KVTIERD_SERVER_KEY": "the daemon's public key, for an address of another machine (tcp://HOST:PORT)",
            "KVTIERD_KEY_FILE": "file with one's own key pair, for such an address; `kvtierctl keygen` makes it",
        }
    )
    yield ".SH EXIT STATUS"
    yield from _terms(
        {
            "0": "done, all is well",
            "1": "a check failed or a goal was missed",
            "64": "used wrongly",
            "69": "no daemon answers, or something is not installed",
            "74": "a file or a disk refused",
        }
    )
    yield from (".SH SEE ALSO", "kvtierd(8), kvtierd.yaml(5)")


def _kvtierd() -> Iterator[str]:
    from kvtierd.daemon.main import build_parser

    parser = build_parser()
    yield from (".SH SYNOPSIS", _text(" ".join(parser.format_usage().split()).removeprefix("usage: ")))
    yield from (".SH OPTIONS", *_options(parser), ".SH SIGNALS", *_terms(SIGNALS), ".SH EXIT STATUS")
    yield from _terms({str(int(code)): text for code, text in EXIT_MEANINGS.items()})
    yield from (".SH FILES", *_terms(FILES), ".SH SEE ALSO", "kvtierctl(1), kvtierd.yaml(5)")


def _configuration() -> Iterator[str]:
    from kvtierd.config.fields import FIELDS, TENANT_FIELDS  # with yaml, which not every command has
    from kvtierd.config.reference import HEAD, default_text, describe, meaning

    yield from (".SH DESCRIPTION", _text(" ".join(HEAD.split())), ".SH SETTINGS")
    for key, field in [*FIELDS.items(), *((field.key, field) for field in TENANT_FIELDS.values())]:
        yield from _terms({f"{key}: {default_text(field)}": f"{meaning(key)} {describe(field)}"})
    yield from (".SH SEE ALSO", "kvtierd(8), kvtierctl(1)")


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    formatter = parser._get_formatter()
    for action in parser._actions:
        names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        value = action.metavar or (",".join(map(str, action.choices)) if action.choices else "")
        shown = f"{names} {value}" if action.option_strings and action.nargs != 0 and value else names
        yield from _terms({shown: formatter._expand_help(action) if action.help else ""})


def _terms(terms: dict[str, str]) -> Iterator[str]:
    for term, text in terms.items():
        yield from (".TP", f".B {_text(term)}", _text(text))


def _text(text: str) -> str:
    """Plain text as roff: its control characters at the start of a line, hyphens and backslashes are only text."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    lines = textwrap.wrap(escaped, 110, break_long_words=False, break_on_hyphens=False)
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in lines)
