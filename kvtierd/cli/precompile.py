"""`kvtierctl precompile`: fill the kernel cache at install, so that no start compiles."""

from __future__ import annotations

import argparse
import os

from kvtierd.cli.errors import CommandError, Failure
from kvtierd.config.loader import load
from kvtierd.config.options import add_options
from kvtierd.daemon.kernels import choose_cache, load_kernels


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that choose the cache folder are those of the daemon."""
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Compile what is missing. Raises CommandError where nothing can be cached."""
    settings = load(config=args.config, options=args.options, environment=os.environ).settings
    # Deferred: importing Numba takes a while, which `kvtierctl --help` should not.
    from kvtierd.index.jit import SOURCES

    cache = choose_cache(settings.cache_dir)
    if cache.directory is None:
        raise CommandError(Failure.IO, cache.note)
    print(f"{cache.note}; loaded in {load_kernels(folders=SOURCES):.2f} s")
    return 0
