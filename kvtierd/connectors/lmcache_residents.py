"""Which of LMCache's objects are in the daemon, as far as this process stored or found them: for listings and accounts.

The daemon knows objects by the hashes of their keys alone, so that names have to be remembered here. No engine in here.
"""

from __future__ import annotations

import bisect
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

from kvtierd.protocol.results import NamespaceHandle

MAX_RESIDENTS = 1 << 20
"""The oldest are forgotten beyond that: they are found as ever, and no longer listed or accounted for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Resident:
    """An object: its ObjectKey, its namespace, its block key."""

    key: Any
    handle: NamespaceHandle
    name: bytes

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.handle.geometry.block_bytes


class Residents:
    """Objects by block key, numbered in the order in which they were met. Thread-safe."""

    def __init__(self, limit: int = MAX_RESIDENTS) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._by_name: dict[bytes, int] = {}
        self._by_number: dict[int, Resident] = {}
        self._next = 1
        self._numbers: list[int] | None = []
        """Numbers in their order, or None where that is to be made anew."""

    def __len__(self) -> int:
        return len(self._by_name)

    def add(self, items: Sequence[Resident]) -> tuple[list[Resident], list[Resident]]:
        """Which of these were not known, and which were forgotten for them."""
        fresh, forgotten = [], []
        with self._lock:
            for item in items:
                if item.name in self._by_name:
                    continue
                if len(self._by_name) >= self._limit:
                    oldest = self._by_number.pop(next(iter(self._by_number)))
                    del self._by_name[oldest.name]
                    forgotten.append(oldest)
                self._by_name[item.name] = self._next
                self._by_number[self._next] = item
                self._next += 1
                fresh.append(item)
            if fresh:
                self._numbers = None
        return fresh, forgotten

    def remove(self, names: Sequence[bytes]) -> list[Resident]:
        """Forget these; which of them were known."""
        with self._lock:
            numbers = [number for name in names if (number := self._by_name.pop(name, None)) is not None]
            if numbers:
                self._numbers = None
            return [self._by_number.pop(number) for number in numbers]

    def known(self, names: Sequence[bytes]) -> list[Resident]:
        """Those of these names that are known."""
        with self._lock:
            return [self._by_number[number] for name in names if (number := self._by_name.get(name)) is not None]

    def page(self, after: int, count: int, model: str | None) -> tuple[list[Resident], int | None]:
        """Up to `count` objects (of one model) behind number `after`, and the number to go on from, or None at the end.

        Objects that come or go between two pages shift nothing: numbers stay.
        """
        with self._lock:
            if self._numbers is None:
                self._numbers = list(self._by_number)
            page: list[Resident] = []
            for at in range(bisect.bisect_right(self._numbers, after), len(self._numbers)):
                item = self._by_number[self._numbers[at]]
                if model is not None and item.key.model_name != model:
                    continue
                if len(page) == count:
                    return page, self._numbers[at - 1]
                page.append(item)
            return page, None
