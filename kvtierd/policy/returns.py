"""The model of returns: told of every request, it says of what kind its blocks are, and what each kind is worth.

It learns while it runs and knows nothing beforehand. See kinds.py for what it distinguishes, history.py for what it
remembers and rates.py for what it makes of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtierd.index.memory import reserve
from kvtierd.policy import history, kinds
from kvtierd.policy.ages import BINS, bin_widths, ticks
from kvtierd.policy.rates import Levels, fit_if_due

RECORDS_MIN = 1 << 16
RECORDS_MAX = 1 << 20
BLOCKS_A_RECORD = 4

Keys64 = npt.NDArray[np.uint64]


@dataclasses.dataclass(slots=True, eq=False)
class Usage:
    """One request's blocks in prefix order, as the model sees them since `at`, a time in ticks.

    `kinds` [n] uint16 and `paces` [n] uint8 are as `observe` of history.py gives them, `last_key` is the first 8 bytes
    of the last block's key, `story` is the model's.
    """

    kinds: npt.NDArray[np.uint16]
    paces: npt.NDArray[np.uint8]
    last_key: int
    at: int
    story: npt.NDArray[np.int64]

    @property
    def size(self) -> int:
        """How many blocks the request has."""
        return self.kinds.size


NO_USAGE = Usage(np.empty(0, np.uint16), np.empty(0, np.uint8), 0, 0, np.zeros(history.STORY_WORDS, np.int64))
"""For policies that do not look at it."""


class ReturnModel:
    """Knows up to `records` observations (rounded up to a power of two), 40 bytes each, or as fit for `blocks` cached.

    `seed` is secret: who knows it could choose keys that collide. `levels` [NODES, BINS] is what blocks are compared
    by; it changes in place.
    """

    def __init__(self, blocks: int, seed: int, records: int | None = None) -> None:
        wanted = min(RECORDS_MAX, max(RECORDS_MIN, blocks // BLOCKS_A_RECORD)) if records is None else records
        if wanted < 2:
            raise ValueError(f"records is {records}; the model needs at least 2")
        size = 1 << (wanted - 1).bit_length()
        self._ring: history.Records = reserve((size,), history.RECORD)
        self._heads: history.Heads = reserve((size,), np.int32)
        self._returned = np.zeros((kinds.KINDS, BINS), np.float32)
        self._unreturned = np.zeros((kinds.KINDS, BINS), np.float32)
        self._state = np.zeros(history.STATE_WORDS, np.int64)
        self._state[history.SECRET] = seed
        self._parents = kinds.parents()
        self._widths = np.stack(bin_widths())
        self._scratch = np.zeros((3, kinds.NODES, BINS), np.float32)
        self.levels: Levels = np.zeros((kinds.NODES, BINS), np.int16)
        self.now = 0
        """Tick of the last request."""
        self._fit_if_due()

    def observe(self, keys: Keys64, hits: int, now_ns: int, *, again: Usage | None = None) -> Usage:
        """Take note of a request for the blocks of a prefix, of which the first `hits` were cached.

        A request that was told of before and has more blocks now (its answer was stored too) passes the first usage as
        `again`, so that it counts once. Raises ValueError for keys that are not [n] uint64, and hits beyond them.
        """
        if keys.ndim != 1 or keys.dtype != np.uint64:
            raise ValueError(f"keys are {keys.dtype} of shape {keys.shape}; they must be uint64 of shape [n]")
        if not 0 <= hits <= keys.size:
            raise ValueError(f"{hits} of {keys.size} blocks cannot be hits")
        self.now = ticks(now_ns)
        made = np.empty(keys.size, np.uint16)
        paces = np.empty(keys.size, np.uint8)
        story = np.zeros(history.STORY_WORDS, np.int64) if again is None else again.story.copy()
        began = -1 if again is None else again.at
        history.observe(
            self._heads, self._ring, self._returned, self._unreturned, self._state, np.ascontiguousarray(keys),
            self.now, hits, began, story, made, paces,
        )  # fmt: skip
        self._fit_if_due()
        return Usage(made, paces, keys.item(-1) if keys.size else 0, self.now, story)

    @property
    def columns(self) -> tuple[Any, ...]:
        """Levels, heads, ring, returned, unreturned, state, parents, widths and scratch, for compiled code that
        observes by itself (`observe`, then `fit_if_due`). Whoever does sets `now`."""
        return (
            self.levels, self._heads, self._ring, self._returned, self._unreturned, self._state, self._parents,
            self._widths, self._scratch,
        )  # fmt: skip

    def learned(self, most_bytes: int) -> dict[str, bytes]:
        """What was learned, for `relearn` of the daemon's next life: its rates, and where all of it together has at
        most so many bytes what it remembers of single blocks too."""
        rates = {"returned": self._returned.tobytes(), "unreturned": self._unreturned.tobytes()}
        if self._ring.nbytes + self._heads.nbytes > most_bytes:
            return rates
        return rates | {
            "ring": self._ring.tobytes(),
            "heads": self._heads.tobytes(),
            "state": self._state.tobytes(),
        }

    def relearn(self, learned: Mapping[str, bytes], now_ns: int) -> bool:
        """Go on from what an earlier life of this version learned, on the same clock; whether it fits this model.

        Arrays change in place, so that those who hold `columns` see it.
        """
        named = {
            "returned": self._returned, "unreturned": self._unreturned, "ring": self._ring, "heads": self._heads,
            "state": self._state,
        }  # fmt: skip
        self.now = ticks(now_ns)
        if not learned or any(name not in named or len(data) != named[name].nbytes for name, data in learned.items()):
            return False
        for name, data in learned.items():
            named[name][:] = np.frombuffer(data, named[name].dtype).reshape(named[name].shape)
        self._state[history.DUE] = 0
        self._fit_if_due()
        return True

    def bytes_used(self) -> int:
        """Bytes of all its memory, what is only reserved included."""
        arrays = (self._ring, self._heads, self._returned, self._unreturned, self._scratch, self.levels)
        return sum(array.nbytes for array in arrays)

    def _fit_if_due(self) -> None:
        fit_if_due(
            self._ring, self._returned, self._unreturned, self._state, self._parents, self._widths, self._scratch,
            self.levels, self.now,
        )  # fmt: skip
