"""Where a value was written, and what is wrong with it."""

from __future__ import annotations

import dataclasses

DEFAULT = "default"


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """A value as text, and its origin: `FILE:LINE`, `$VARIABLE`, `--option` or a profile."""

    text: str
    origin: str


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: where, which key ("" where the whole file is meant), what is wrong and what to do."""

    origin: str
    key: str
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.origin, self.key, self.text) if part)


Layer = dict[str, Written]
"""Values of one source by dotted key."""
