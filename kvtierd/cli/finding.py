"""What a check of the doctor found."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator

from kvtierd.config.schema import Settings


class Verdict(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """Neither good nor bad: a fact."""
    WARN = "warn"
    """Works, and could be better."""
    FAIL = "fail"
    """The daemon will not start, or not do what it is configured to."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor: what was looked at, how it is, and what to do where something can be done."""

    name: str
    verdict: Verdict
    text: str
    advice: str = ""


Check = tuple[str, Callable[[Settings], Iterator[Finding]]]
"""Name, and what looks."""


def failed(name: str, error: OSError) -> Finding:
    """A check that could not look."""
    return Finding(name, Verdict.WARN, f"cannot be looked at: {error}", "run this as root, or as the daemon's user")
