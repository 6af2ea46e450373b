"""Compiled code that not every daemon needs: attention and the codec of FP8, loaded when somebody may want them.

They are in the cache by then (kvtierd.daemon.kernels), so that this takes some tenths of a second, in a thread, and
compiles nothing. Until then the daemon is some 15 MiB smaller.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

_after: list[Callable[[], None]] = []


def after_loading(call: Callable[[], None]) -> None:
    """Have `call()` follow each loading: loading brings in parts of the compiler that nothing needs afterwards."""
    _after.append(call)


def load(name: str) -> Any:
    """The module of that name. Not for the loop: the first time it loads compiled code."""
    is_new = name not in sys.modules
    module = importlib.import_module(name)
    for call in _after if is_new else ():
        call()
    return module
