"""What may be written to nvme, decided by prefix: an SSD wears with every byte, and most blocks are read never again.

A policy is asked with the keys of a prefix that was just used or stored, in order, and answers how many leading blocks
may have a copy on nvme. Only a leading run is ever admitted, because what comes after a hole cannot be found.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtierd.policy.key_filter import KeyFilter

Keys64 = npt.NDArray[np.uint64]

DAY_NS = 86_400 * 1_000_000_000


class Admission(Protocol):
    """How many leading blocks of a prefix may be written to nvme."""

    def admit(self, keys: Keys64, on_nvme: int, block_bytes: int, now_ns: int) -> int:
        """Of the blocks `keys` [n] uint64, used or stored by one request, the length of the run that is admitted.

        The first `on_nvme` are there already and cost nothing. The answer is in on_nvme..n, and what it exceeds
        `on_nvme` by is taken as written.
        """
        ...


class AdmitAll:
    """Everything is written."""

    def admit(self, keys: Keys64, on_nvme: int, block_bytes: int, now_ns: int) -> int:  # noqa: ARG002
        """See Admission."""
        return int(keys.size)


class SecondAccess:
    """A prefix is written when it is used for the second time, as far as the filter remembers.

    What counts is the leading run of blocks that were used before. Where that is most of the request (`whole_share` of
    it or more) all of it is admitted: a conversation that went on once goes on, with its new blocks. `keys_max` should
    be several times the blocks of the host tier: what returns from further away than the filter remembers is new again.
    Raises ValueError unless 0 < whole_share <= 1.
    """

    def __init__(self, keys_max: int, secret: int, whole_share: float = 0.5) -> None:
        if not 0 < whole_share <= 1:
            raise ValueError(f"whole_share is {whole_share}; it must be above 0 and at most 1")
        self._seen = KeyFilter(keys_max, secret)
        self._whole_share = whole_share

    def admit(self, keys: Keys64, on_nvme: int, block_bytes: int, now_ns: int) -> int:  # noqa: ARG002
        """See Admission. Every call is one use of all its blocks."""
        again = self._seen.add(keys)
        again[:on_nvme] = True
        run = int(keys.size if again.all() else again.argmin())
        return int(keys.size) if run >= self._whole_share * keys.size else run


class Budgeted:
    """Bounds what another policy admits to so many bytes a day, by a bucket that fills evenly.

    `burst` is the share of a day's bytes that can be saved up. A prefix is admitted whole or not at all, since a part
    of it would only be paid for again later; one that the full bucket could not pay for gets the part that it can.
    Raises ValueError unless bytes_per_day > 0 and 0 < burst <= 1.
    """

    def __init__(self, inner: Admission, bytes_per_day: int, now_ns: int, burst: float = 1 / 24) -> None:
        if bytes_per_day <= 0 or not 0 < burst <= 1:
            raise ValueError(f"bytes_per_day is {bytes_per_day} and burst {burst}; they must be positive, burst <= 1")
        self._inner = inner
        self._bytes_per_ns = bytes_per_day / DAY_NS
        self._full = bytes_per_day * burst
        self._level = self._full
        self._filled_ns = now_ns
        self.refused_blocks = 0
        """Blocks that the other policy admitted and the budget did not."""

    def admit(self, keys: Keys64, on_nvme: int, block_bytes: int, now_ns: int) -> int:
        """See Admission. Raises ValueError for blocks without bytes."""
        if block_bytes <= 0:
            raise ValueError(f"block_bytes is {block_bytes}; a block has some")
        wanted = self._inner.admit(keys, on_nvme, block_bytes, now_ns)
        self._level = min(self._full, self._level + max(0, now_ns - self._filled_ns) * self._bytes_per_ns)
        self._filled_ns = max(self._filled_ns, now_ns)
        affordable = math.floor(min(self._level, self._full) / block_bytes)
        new = wanted - on_nvme
        granted = new if new <= affordable else 0
        if new * block_bytes > self._full and self._level >= self._full:
            granted = min(new, affordable)
        self._level -= granted * block_bytes
        self.refused_blocks += new - granted
        return on_nvme + granted
