"""Sizes and durations as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
PAGE_BYTES = 4096
"""Alignment of every stored layer part: what O_DIRECT, GPUDirect Storage and the page tables want."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])i?)?b?\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_UNITS = ("KiB", "MiB", "GiB", "TiB")


def parse_bytes(text: str | int) -> int:
    """Read `4096`, `64KiB`, `1.5 GiB` or `2G`; letters count in powers of 1024, as in systemd.

    Raises ValueError naming the text when it is not a size.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _SIZE.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it like 4096, 64KiB or 1.5GiB")
    return int(Fraction(match[1]) * 1024 ** _POWERS[(match[2] or "").lower()])


def format_bytes(count: float) -> str:
    """Write a size with three significant digits: `1.50 GiB`."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    size, step = count / 1024, 0
    while abs(size) >= 1024 and step < len(_UNITS) - 1:
        size, step = size / 1024, step + 1
    decimals = 2 if abs(size) < 10 else 1 if abs(size) < 100 else 0
    return f"{size:.{decimals}f} {_UNITS[step]}"


def align_up(count: int, step: int = PAGE_BYTES) -> int:
    """Round up to a multiple of `step`."""
    return -(-count // step) * step
