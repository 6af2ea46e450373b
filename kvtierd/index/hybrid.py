"""The hybrid index: extents of several sizes within one sequence, which split and merge while keys stay as they are.

A sequence is cut into granules (64 tokens); an extent covers one to eight of them, next to each other, and lies at a
place of its owner's choice. A map from granule to extent answers where a token lies in one step and makes a split or a
merge a matter of at most eight entries, whatever the length of the sequence. Blocks are fixed spans of tokens and need
not end where extents do: one may lie in several extents, one extent may hold several.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtierd.core.units import align_up
from kvtierd.index import extents as steps
from kvtierd.index.extents import BEGIN, FRESH, GRANULE_TOKENS, GRANULES, LENGTH, OFFSET, Counts, Extents, Uses
from kvtierd.index.layout import Rows
from kvtierd.index.memory import reserve

EXTENT_GRANULES_MAX = 8
GRANULES_MAX = 1 << 24
"""A billion tokens."""


class HybridIndex:
    """The extents of one sequence of up to `tokens_max` tokens (a whole number of granules of 64).

    Extents have numbers that stay valid until the extent is split (the first part keeps it) or merged into another.
    `place` is any int32 of the owner's, such as a slot, or ABSENT (-1); an extent begins `offset` granules into it, so
    that a split moves no bytes: its parts lie where they lay. Memory is 8 bytes a granule and 16 an extent.
    Raises ValueError, with nothing changed, for tokens, extents or lengths that are out of range.
    """

    def __init__(self, tokens_max: int) -> None:
        granules = tokens_max // GRANULE_TOKENS
        if tokens_max % GRANULE_TOKENS or not 1 <= granules <= GRANULES_MAX:
            raise ValueError(f"tokens_max is {tokens_max}; it must be a multiple of {GRANULE_TOKENS}, at least that")
        self._owner: Rows = reserve((granules,), np.int32, huge=False)
        self._extents: Extents = reserve((granules, 4), np.int32, huge=False)
        self._uses: Uses = reserve((granules,), np.uint32, huge=False)
        self._counts: Counts = np.zeros(3, np.int64)

    @property
    def tokens(self) -> int:
        """Length of the sequence."""
        return int(self._counts[GRANULES]) * GRANULE_TOKENS

    def append(self, tokens: int, place: int) -> int:
        """Extend the sequence by an extent of `tokens` (64 to 512, whole granules) at `place`; returns its number."""
        return self.append_many(tokens, np.array([place], np.int32))

    def append_many(self, tokens: int, places: Rows) -> int:
        """Extend the sequence by extents of `tokens` each, one for each of `places` ([n] int32); returns the number of
        the last one, -1 for none."""
        length = self._granules_of(tokens)
        if self.tokens + tokens * places.size > len(self._owner) * GRANULE_TOKENS:
            more, most = tokens * places.size, len(self._owner) * GRANULE_TOKENS
            raise ValueError(f"{more} tokens after {self.tokens} are over {most}")
        return int(steps.append(self._owner, self._extents, self._counts, length, places))

    def assign(self, begins: Counts, tokens: int, places: Rows, offsets: Counts | None = None) -> None:
        """Make `tokens` from each of `begins` on ([n] int64) an extent of their own at one of `places` ([n] int32).

        They are cut out of the extents that held them; what remains of those lies where it lay. `offsets` ([n] tokens)
        is where in their places they begin, else at 0.
        """
        length = self._granules_of(tokens)
        if begins.size == 0:
            return
        if not 0 <= begins.min() <= begins.max() <= self.tokens - tokens or (begins % GRANULE_TOKENS).any():
            spans = f"{tokens} tokens from each of {begins.min()}..{begins.max()}"
            raise ValueError(f"{spans} are not all whole granules of 0..{self.tokens}")
        within = np.zeros(begins.size, np.int32)
        if offsets is not None:
            within = (offsets // GRANULE_TOKENS).astype(np.int32)
        steps.assign(self._owner, self._extents, self._counts, begins // GRANULE_TOKENS, length, places, within)

    def locate(self, tokens: npt.NDArray[np.int64]) -> Rows:
        """Numbers of the extents that hold these tokens ([n])."""
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.tokens:
            raise ValueError(f"tokens {tokens.min()}..{tokens.max()} are not all in 0..{self.tokens - 1}")
        found: Rows = self._owner[tokens // GRANULE_TOKENS]
        return found

    def overlapping(self, begin: int, end: int) -> Rows:
        """Numbers of the extents that hold any of tokens begin..end-1, in order."""
        first, last = self._span(begin, end)
        out = np.empty(last - first, np.int32)
        return out[: steps.overlapping(self._owner, self._extents, first, last, out)]

    def placed(self, begin: int, end: int) -> Counts:
        """`describe` of those of them that lie somewhere (not at ABSENT), in order."""
        first, last = self._span(begin, end)
        out = np.empty((last - first, 4), np.int64)
        return out[: steps.placed(self._owner, self._extents, first, last, out)]

    def describe(self, extents: Rows) -> Counts:
        """Columns of extents ([n, 4] int64): first token, tokens, place, offset in the place in tokens."""
        self._check(extents)
        columns = self._extents[extents].astype(np.int64)
        columns[:, [BEGIN, LENGTH, OFFSET]] *= GRANULE_TOKENS
        return columns

    def split(self, extent: int, tokens: npt.NDArray[np.int64]) -> Rows:
        """Cut an extent into parts of these lengths in tokens ([n], together its own); returns their numbers."""
        self._check(np.array([extent], np.int32))
        lengths = np.array([self._granules_of(int(count)) for count in tokens], np.int32)
        if lengths.sum() != self._extents[extent, LENGTH]:
            whole = int(self._extents[extent, LENGTH]) * GRANULE_TOKENS
            raise ValueError(f"parts of {int(np.sum(tokens))} tokens do not make the {whole} of extent {extent}")
        out = np.empty(lengths.size, np.int32)
        steps.split(self._owner, self._extents, self._counts, extent, lengths, out)
        return out

    def merge(self, extents: Rows, place: int) -> int:
        """Make one extent of neighbours ([n], in order, at most 512 tokens), now at `place`; returns its number.

        The owner has brought their bytes together there before.
        """
        self._check(extents)
        begins, lengths = self._extents[extents, BEGIN], self._extents[extents, LENGTH]
        if extents.size == 0 or (begins[1:] != begins[:-1] + lengths[:-1]).any():
            raise ValueError(f"extents {extents.tolist()} are not neighbours in order")
        self._granules_of(int(lengths.sum()) * GRANULE_TOKENS)
        steps.merge(self._owner, self._extents, self._counts, extents, place)
        return int(extents[0])

    def pieces(self, firsts: Rows, blocks: Rows, block_tokens: int, begin: int, end: int) -> Counts:
        """Where tokens begin..end-1 of some blocks lie: [n, 4] int64, first token, tokens, place, offset there.

        The blocks follow each other, whatever the order of their extents here: those of block i begin at token
        `firsts[i]` ([n] int32, -1 for a block that is one extent, at `blocks[i]`). Neighbours at one place are one.
        Spans end with granules: begin is rounded down and end up.
        """
        granules = self._granules_of(block_tokens)
        first, last = begin // GRANULE_TOKENS, -(-end // GRANULE_TOKENS)
        out = np.empty((max(0, last - first), 4), np.int64)
        starts = np.where(firsts < 0, firsts, firsts // GRANULE_TOKENS)
        found = steps.pieces(self._owner, self._extents, starts, blocks, granules, first, last, out)
        out = out[:found]
        out[:, [BEGIN, LENGTH, OFFSET]] *= GRANULE_TOKENS
        return out

    def touch_blocks(self, firsts: Rows, block_tokens: int, begin: int, end: int) -> None:
        """Count a use of tokens begin..end-1 of blocks that follow each other, as `pieces` has them."""
        starts = np.where(firsts < 0, firsts, firsts // GRANULE_TOKENS)
        granules = self._granules_of(block_tokens)
        steps.touch_blocks(self._uses, starts, granules, begin // GRANULE_TOKENS, -(-end // GRANULE_TOKENS))

    def uses_between(self, begin: int, end: int) -> Uses:
        """Uses of each granule that holds any of tokens begin..end-1, a copy."""
        first, last = self._span(begin, end)
        return self._uses[first:last].copy()

    def halve_uses(self, begin: int, end: int) -> bool:
        """Let the uses of these count for half, rounded down; whether any are left."""
        return bool(steps.halve_uses(self._uses, *self._span(begin, end)))

    def forget_uses(self, begin: int, end: int) -> None:
        """Begin anew to count the uses of these."""
        steps.forget_uses(self._uses, *self._span(begin, end))

    def touch(self, begin: int, end: int) -> None:
        """Count a use of every granule that holds any of tokens begin..end-1."""
        steps.touch(self._uses, *self._span(begin, end))

    def uses(self, extent: int) -> Uses:
        """Uses of each granule of an extent, [granules] uint32: what tells whether a part of it is used alone."""
        self._check(np.array([extent], np.int32))
        begin, length = self._extents[extent, [BEGIN, LENGTH]]
        return self._uses[begin : begin + length].copy()

    def nbytes(self) -> int:
        """RAM of what is in use, in whole pages."""
        granules, extents = int(self._counts[GRANULES]), int(self._counts[FRESH])
        per_extent = self._extents.strides[0]
        return 2 * align_up(granules * self._owner.itemsize) + align_up(extents * per_extent)

    def _granules_of(self, tokens: int) -> int:
        if tokens % GRANULE_TOKENS or not 1 <= tokens // GRANULE_TOKENS <= EXTENT_GRANULES_MAX:
            most = EXTENT_GRANULES_MAX * GRANULE_TOKENS
            raise ValueError(f"an extent of {tokens} tokens is no multiple of {GRANULE_TOKENS} up to {most}")
        return tokens // GRANULE_TOKENS

    def _span(self, begin: int, end: int) -> tuple[int, int]:
        if not 0 <= begin <= end <= self.tokens:
            raise ValueError(f"tokens {begin}..{end} are not within 0..{self.tokens}")
        first = begin // GRANULE_TOKENS
        return first, -(-end // GRANULE_TOKENS) if begin < end else first

    def _check(self, extents: Rows) -> None:
        known = extents[(extents >= 0) & (extents < self._counts[FRESH])]
        if known.size < extents.size or (self._extents[known, LENGTH] == 0).any():
            raise ValueError(f"extents {extents.tolist()} are not all in the sequence")
