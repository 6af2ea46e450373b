"""What a daemon complained of by itself: tortured or not, it has no reason to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_BAD = re.compile(r"Traceback|^\S+ (?:ERROR|CRITICAL)\b|Fatal Python error|never retrieved|was never awaited")


def complaints(log: Path) -> Iterator[str]:
    """Each kind of bad line in a daemon's log, once."""
    seen: set[str] = set()
    for line in log.read_text(errors="replace").splitlines():
        kind = re.sub(r"\b[0-9a-f]*\d[0-9a-f]*\b", "N", line)
        if _BAD.search(line) and kind not in seen:
            seen.add(kind)
            yield f"the daemon's log says {line[:300]!r}"
