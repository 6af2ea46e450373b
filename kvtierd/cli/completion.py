"""`kvtierctl completion`: completion of commands and options for a shell.

`source <(kvtierctl completion)` tries it; for zsh, after `autoload -U bashcompinit && bashcompinit`.
"""

from __future__ import annotations

import argparse

from kvtierd.cli import manual


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which shell; zsh reads what bash does."""
    parser.add_argument("shell", nargs="?", choices=["bash", "zsh"], default="bash", help="which shell (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    if args.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    print(manual.completion(), end="")
    return 0
