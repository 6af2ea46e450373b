"""What may be written to nvme, decided by prefix: an SSD wears with every byte, and most blocks are read never again.

A policy is asked about a prefix that was just used or stored, in order, and answers how many leading blocks may have a
copy on nvme. Only a leading run is ever admitted, because what comes after a hole cannot be found.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import numpy.typing as npt

Marks = npt.NDArray[np.bool_]

DAY_NS = 86_400 * 1_000_000_000


class Admission(Protocol):
    """How many leading blocks of a prefix may be written to nvme."""

    def admit(self, again: Marks, there: Marks, block_bytes: int, now_ns: int) -> int:
        """Of a prefix of n blocks, used or stored by one request, the length of the run that is admitted.

        `again` [n] says which blocks were used before this request, `there` [n] which are on nvme already (or on
        their way) and cost nothing. What of the answer is not there is taken as written.
        """
        ...


class AdmitAll:
    """Everything is written."""

    def admit(self, again: Marks, there: Marks, block_bytes: int, now_ns: int) -> int:  # noqa: ARG002
        """See Admission."""
        return int(again.size)


class SecondAccess:
    """A prefix is written when it is used for the second time.

    What counts is the leading run of blocks that were used before. Where that is most of the request (`whole_share` of
    it or more) all of it is admitted: a conversation that went on once goes on, with its new blocks.
    Raises ValueError unless 0 < whole_share <= 1.
    """

    def __init__(self, whole_share: float = 0.5) -> None:
        if not 0 < whole_share <= 1:
            raise ValueError(f"whole_share is {whole_share}; it must be above 0 and at most 1")
        self._whole_share = whole_share

    def admit(self, again: Marks, there: Marks, block_bytes: int, now_ns: int) -> int:  # noqa: ARG002
        """See Admission."""
        known = again | there
        run = leading(known)
        return int(known.size) if run >= self._whole_share * known.size else run


class Budgeted:
    """Bounds what another policy admits to so many bytes a day, by a bucket that fills evenly.

    `burst` is the share of a day's bytes that can be saved up; in no 24 hours is more than `bytes_per_day` admitted.
    A prefix is admitted whole or not at all, since a part of it would only be paid for again later; one that the full
    bucket could not pay for gets the part that it can. With `scarce`, that policy decides instead of `inner` while
    the bucket is less than half full. Raises ValueError unless bytes_per_day > 0 and 0 < burst < 1.
    """

    def __init__(
        self, inner: Admission, bytes_per_day: int, now_ns: int, burst: float = 0.25, scarce: Admission | None = None
    ) -> None:
        if bytes_per_day <= 0 or not 0 < burst < 1:
            raise ValueError(
                f"bytes_per_day is {bytes_per_day} and burst {burst}; bytes must be positive, 0 < burst < 1"
            )
        self._inner = inner
        self._scarce = scarce or inner
        self._bytes_per_ns = bytes_per_day * (1 - burst) / DAY_NS
        self._full = bytes_per_day * burst
        self._level = self._full
        self._filled_ns = now_ns
        self.refused_blocks = 0
        """Blocks that the other policy admitted and the budget did not."""

    def admit(self, again: Marks, there: Marks, block_bytes: int, now_ns: int) -> int:
        """See Admission. Raises ValueError for blocks without bytes."""
        if block_bytes <= 0:
            raise ValueError(f"block_bytes is {block_bytes}; a block has some")
        level = self.level_bytes(now_ns)
        policy = self._inner if 2 * level >= self._full else self._scarce
        wanted = policy.admit(again, there, block_bytes, now_ns)
        places = np.flatnonzero(~there[:wanted])
        affordable = math.floor(level / block_bytes)
        granted = places.size if places.size <= affordable else 0
        if places.size * block_bytes > self._full and level >= self._full:
            granted = min(places.size, affordable)
        self._level -= granted * block_bytes
        self.refused_blocks += places.size - granted
        return wanted if granted == places.size else int(places[granted])

    def charge(self, written_bytes: int) -> None:
        """Something else was written, and counts: nothing is admitted until that is made up for."""
        self._level -= written_bytes

    def level_bytes(self, now_ns: int) -> float:
        """What may be written now; below 0 where more was charged than there was."""
        self._level = min(self._full, self._level + max(0, now_ns - self._filled_ns) * self._bytes_per_ns)
        self._filled_ns = max(self._filled_ns, now_ns)
        return self._level


def leading(marks: Marks) -> int:
    """Length of the leading run of True."""
    return int(marks.size) if marks.all() else int(marks.argmin())
