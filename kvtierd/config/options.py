"""The options of a command line that set configuration."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

_NAMED = {
    "--data-dir": ("nvme.directory", "DIR", "folder of the nvme tier's segments"),
    "--runtime-dir": ("server.runtime_dir", "DIR", "folder of the sockets and the lock"),
    "--tenant": ("server.tenant", "NAME", "tenant that this daemon serves"),
    "--log-level": ("log.level", "LEVEL", "debug, info, warning or error"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--config`, `--set` and the named options; each named one is short for a `--set`."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="read this file in place of those in /etc/kvtierd")
    parser.add_argument(
        "--set", action=_Collect, dest="options", default=[], metavar="SECTION.KEY=VALUE", help="set any value"
    )
    for name, (key, metavar, text) in _NAMED.items():
        parser.add_argument(name, action=_Collect, dest="options", metavar=metavar, help=f"{text} ({key})")


class _Collect(argparse.Action):
    """Gathers (key, text, option) in the order of the command line, so that the last one wins."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        text, name = str(values), option or ""
        if name == "--set":
            key, equals, text = text.partition("=")
            if not equals:
                parser.error(f"--set {key!r} has no value; write --set SECTION.KEY=VALUE")
        else:
            key, metavar, _ = _NAMED[name]
            if metavar == "DIR" and text:
                # A shell's user means the folder relative to where he stands.
                text = os.path.abspath(text)  # noqa: PTH100 - Path.absolute keeps `..`
        namespace.options = [*namespace.options, (key.strip(), text, name)]
