"""What a command may fail with."""

from __future__ import annotations

import enum

from kvtierd.core.errors import KvtierdError


class Failure(enum.IntEnum):
    """Exit codes of `kvtierctl`, as in sysexits.h."""

    USAGE = 64
    UNAVAILABLE = 69
    """No daemon answers."""
    IO = 74


class CommandError(KvtierdError):
    """A command cannot do what was asked; the text is one line that says what to do."""

    def __init__(self, exit_code: Failure, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code
