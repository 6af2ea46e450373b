"""What a part of the torture is, and what one unit of its work is given and gives."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """A piece of work that is done whole or again: `amount` of what its part counts, from `seed`, below `folder`."""

    part: str
    number: int
    amount: int
    seed: int
    folder: Path


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A kind of torture: how much of it there is in full and in small form, and how much of that one unit does.

    `run` yields a line for each finding; an exception is one too.
    """

    name: str
    counts: str
    full: int
    small: int
    per_unit: int
    run: Callable[[Unit], Iterator[str]]

    def amounts(self, total: int) -> list[int]:
        """What each unit does so that it is `total` in all; ValueError for less than nothing."""
        if total < 0:
            raise ValueError(f"{self.name}: {total} {self.counts}; it must be 0 or more")
        whole, rest = divmod(total, self.per_unit)
        return [self.per_unit] * whole + [rest] * bool(rest)


def seed_of(seed: int, part: str, number: int) -> int:
    """The seed of a unit: the same for the same run, part and number, whatever was done before."""
    digest = hashlib.blake2b(f"{seed}/{part}/{number}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")
