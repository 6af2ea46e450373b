"""The adaptive front: one way to ask for the blocks of sequences, three schemes behind it, switched while it is asked.

The page table knows every block by its key and is always right; it is what answers for short sequences, and for those
that are seldom asked about. For the others the front keeps a bitmap of presence and a column of rows in step with what
is inserted and deleted, so that a question about thousands of positions is not thousands of probes. Extents of several
sizes, made by split and merge, are in a hybrid index beside them. Which scheme a sequence has is decided from what its
questions and its changes have cost (`crossover`), or by whoever wants one, and a namespace whose sequences were worth
tracking has the next one tracked from its beginning.

A switch moves a sequence's frontier (`sequence`) a few positions with each call; there is no old form and no new one,
and every answer is right between any two steps. Answers are copies: what a reader was given does not change under it,
whatever is switched, split or merged since.
"""

from __future__ import annotations

import numpy as np

from kvtierd.index.block_table import BlockTable
from kvtierd.index.crossover import MEASURED, Costs, Scheme
from kvtierd.index.extents import Uses
from kvtierd.index.hybrid import HybridIndex
from kvtierd.index.layout import Keys, Rows
from kvtierd.index.page_table import PageTable
from kvtierd.index.sequence import POSITIONS_MAX, Extents, Positions, Sequence
from kvtierd.index.switches import Entry, Switches
from kvtierd.index.watch import Watch

WATCHED_MAX = 1 << 20
"""Positions tracked in all sequences together: 64 M tokens in blocks of 64."""
SEQUENCES_MAX = 4096
"""Sequences at one time: each may take eight mappings of the 65,530 that a process has."""
POSITIONS_PER_CALL = 64
"""Positions that a call moves of a switch under way: some 30 µs."""


class AdaptiveFront:
    """Sequences over one page table. Blocks must come and go through `insert` and `delete` here, not past them.

    Positions are numbers of blocks in a sequence, 0 the first; tokens likewise. For one thread, as the page table.
    Raises ValueError, with nothing changed, for a sequence that is not open and for positions or tokens outside it.
    """

    def __init__(
        self,
        blocks: BlockTable,
        pages: PageTable,
        *,
        watched_max: int = WATCHED_MAX,
        costs: Costs = MEASURED,
        positions_per_call: int = POSITIONS_PER_CALL,
    ) -> None:
        self._blocks, self._pages, self._costs, self._per_call = blocks, pages, costs, positions_per_call
        self._watch = Watch(watched_max)
        self._switches = Switches(costs)
        self._next_number = 0

    # Blocks.

    @property
    def tracks(self) -> bool:
        """Whether blocks that come or go are anybody's concern here."""
        return len(self._watch) > 0 or self._switches.busy

    def insert(self, rows: Rows) -> Rows:
        """`PageTable.insert`, with the tracked sequences kept in step."""
        outcome = self._pages.insert(rows)
        if len(self._watch):
            self._tell(rows[outcome == -1], came=True)
        self._switches.work(self._per_call)
        return outcome

    def delete(self, rows: Rows) -> int:
        """`PageTable.delete`, likewise; the records must still hold their keys."""
        deleted = self._pages.delete(rows)
        if len(self._watch):
            self._tell(rows, came=False)
        self._switches.work(self._per_call)
        return deleted

    def _tell(self, rows: Rows, *, came: bool) -> None:
        """Tell the sequences that have these blocks."""
        for sequences, positions, found in self._watch.matches(self._blocks.records, rows):
            first = int(sequences[0])
            if np.count_nonzero(sequences != first) == 0:
                self._tell_one(first, positions, found, came=came)
                continue
            for number in np.unique(sequences).tolist():
                mine = sequences == number
                self._tell_one(number, positions[mine], found[mine], came=came)

    def _tell_one(self, number: int, positions: Positions, rows: Rows, *, came: bool) -> None:
        entry = self._switches.known(number)
        if came:
            entry.sequence.came(positions, rows)
        else:
            entry.sequence.went(positions, rows)
        entry.account.changed(rows.size, self._costs)
        self._switches.consider(number, entry)

    # Sequences.

    def open(self, namespace: int, block_tokens: int, keys: Keys) -> int:
        """Begin a sequence with its first blocks ([n, 32] uint8); returns its number, which is never used again."""
        if block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens}; it must be at least 1")
        self._pages.check_namespace(namespace)
        _check_growth(0, len(keys))
        if len(self._switches) >= SEQUENCES_MAX:
            raise ValueError(f"{SEQUENCES_MAX} sequences are open or being closed; no more are possible")
        number, self._next_number = self._next_number, self._next_number + 1
        sequence = Sequence(number, namespace, block_tokens, self._pages, self._watch)
        sequence.append(keys)
        self._switches.add(number, sequence)
        self._switches.work(self._per_call)
        return number

    def append(self, number: int, keys: Keys) -> None:
        """Add blocks ([n, 32] uint8) at the end of a sequence."""
        entry = self._switches.of(number)
        _check_growth(entry.sequence.length, len(keys))
        entry.sequence.append(keys)
        self._switches.consider(number, entry)
        self._switches.work(self._per_call)

    def close(self, number: int) -> None:
        """Forget a sequence; its blocks stay. What was kept for it is taken apart with the next calls."""
        self._switches.close(number, self._switches.of(number))
        self._switches.work(self._per_call)

    def length(self, number: int) -> int:
        """Positions of a sequence."""
        return self._switches.of(number).sequence.length

    # Questions.

    def rows(self, number: int, positions: Positions) -> Rows:
        """Rows of the blocks at some positions ([n] int64): [n] int32, -1 where there is none."""
        entry = self._switches.of(number)
        wanted = np.asarray(positions, np.int64)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < entry.sequence.length:
            ends = f"{wanted.min()}..{wanted.max()}"
            raise ValueError(f"positions {ends} are not all in 0..{entry.sequence.length - 1} of sequence {number}")
        rows = entry.sequence.rows(wanted)
        self._asked(number, entry, wanted.size)
        return rows

    def run(self, number: int, start: int = 0) -> int:
        """How many positions from `start` on are present without a gap: the prefix from 0, and behind it a hole."""
        entry = self._entry_with(number, start, None)
        run = entry.sequence.run(start)
        self._asked(number, entry, run + 1)
        return run

    def matching(self, number: int, keys: Keys) -> int:
        """How many leading ones of `keys` ([n, 32] uint8, contiguous) are the sequence's first ones, in order.

        What lets somebody who comes with keys ask about positions: 4 words are compared for each, and not hashed.
        """
        return self._switches.of(number).sequence.matching(keys)

    def leading(self, number: int, limit: int) -> Rows:
        """Rows of the leading run of present positions, up to `limit` of them: [n] int32."""
        entry = self._entry_with(number, limit, None)
        rows = entry.sequence.leading(limit)
        self._asked(number, entry, rows.size)
        return rows

    def count(self, number: int, begin: int = 0, end: int | None = None) -> int:
        """How many of positions begin..end-1 are present (up to the sequence's end if `end` is None)."""
        entry = self._entry_with(number, begin, end)
        end = entry.sequence.length if end is None else end
        count = entry.sequence.count(begin, end)
        self._asked(number, entry, end - begin)
        return count

    def holes(self, number: int, begin: int = 0, end: int | None = None) -> Positions:
        """Which of them are not: [n] int64 in order."""
        entry = self._entry_with(number, begin, end)
        end = entry.sequence.length if end is None else end
        holes = np.flatnonzero(entry.sequence.rows_between(begin, end) < 0) + begin
        self._asked(number, entry, end - begin)
        return holes

    def extents(self, number: int, begin: int, end: int) -> Extents:
        """Extents of present blocks that hold any of tokens begin..end-1: [n, 4] int64, in order.

        Columns: first token, tokens, place, offset in the place in tokens. A block is one extent at its row, until it
        is split or merged.
        """
        entry = self._entry_with_tokens(number, begin, end)
        found = entry.sequence.extents(begin, end)
        self._asked(number, entry, -(-(end - begin) // entry.sequence.block_tokens))
        return found

    def _asked(self, number: int, entry: Entry, positions: int) -> None:
        entry.account.asked(positions, self._costs)
        self._switches.consider(number, entry)
        self._switches.work(self._per_call)

    # Extents of several sizes.

    def touch(self, number: int, begin: int, end: int) -> None:
        """Count a use of tokens begin..end-1, in what a hybrid index has of them; `uses` says how often each was."""
        sequence = self._entry_with_tokens(number, begin, end).sequence
        end = min(end, sequence.extended * sequence.block_tokens)
        if sequence.hybrid is not None and begin < end:
            sequence.hybrid.touch(begin, end)

    def uses(self, number: int, token: int) -> Uses:
        """Uses of each granule of the extent that holds a token, [n] uint32; none where no hybrid index has it."""
        sequence = self._entry_with_tokens(number, token, token + 1).sequence
        if sequence.hybrid is None or token >= sequence.extended * sequence.block_tokens:
            return np.empty(0, np.uint32)
        return sequence.hybrid.uses(int(sequence.hybrid.locate(np.array([token], np.int64))[0]))

    def split(self, number: int, token: int, lengths: Positions) -> bool:
        """Cut the extent that holds a token into parts of these lengths in tokens ([n], together its own).

        False, and nothing done, while the sequence is still on its way into a hybrid index: ask again later.
        Raises ValueError for what `HybridIndex.split` does not take, and where no block is present.
        """
        hybrid = self._hybrid(number, token, token + 1)
        if hybrid is None:
            return False
        extent = int(hybrid.locate(np.array([token], np.int64))[0])
        _check_placed(hybrid, token, token + 1)
        hybrid.split(extent, lengths)
        self._switches.of(number).sequence.mixed = True
        return True

    def merge(self, number: int, begin: int, end: int, place: int) -> bool:
        """Make one extent at `place` of those that tokens begin..end-1 are; False as `split`.

        The owner has brought their bytes together there before. Raises ValueError where they do not begin and end
        there, or lie nowhere.
        """
        if place < 0:
            raise ValueError(f"place is {place}; it must not be negative")
        hybrid = self._hybrid(number, begin, end)
        if hybrid is None:
            return False
        _check_placed(hybrid, begin, end)
        extents = hybrid.overlapping(begin, end)
        ends = hybrid.describe(extents[[0, -1]])
        if ends[0, 0] != begin or ends[1, 0] + ends[1, 1] != end:
            raise ValueError(f"no extents of sequence {number} begin at token {begin} and end at {end}")
        hybrid.merge(extents, place)
        self._switches.of(number).sequence.mixed = True
        return True

    def _hybrid(self, number: int, begin: int, end: int) -> HybridIndex | None:
        """The hybrid index of a sequence, if it has these tokens yet; else it is on its way there now."""
        entry = self._entry_with_tokens(number, begin, end)
        if begin == end:
            raise ValueError(f"tokens {begin}..{end} of sequence {number} are none")
        self.want(number, Scheme.HYBRID)
        sequence = entry.sequence
        return sequence.hybrid if end <= sequence.extended * sequence.block_tokens else None

    # Schemes.

    def scheme(self, number: int) -> Scheme:
        """The scheme that all of a sequence has by now."""
        return self._switches.of(number).scheme()

    def want(self, number: int, scheme: Scheme | None) -> None:
        """Give a sequence a scheme, step by step; None leaves it to the front again.

        Raises ValueError for a hybrid index where a block is no whole number of granules or larger than an extent, and
        for leaving it with extents that only it knows.
        """
        entry = self._switches.of(number)
        if entry.sequence.mixed and scheme is not Scheme.HYBRID:
            raise ValueError(f"sequence {number} has extents that were split or merged; only a hybrid index knows them")
        if scheme is Scheme.HYBRID and not entry.sequence.can_extend():
            raise ValueError(
                f"blocks of {entry.sequence.block_tokens} tokens do not fit the granules of a hybrid index"
            )
        entry.pinned = scheme is not None
        if scheme is None:
            scheme = min(entry.target, Scheme.BITMAP)
        entry.target = scheme
        self._switches.consider(number, entry)
        self._switches.work(self._per_call)

    def step(self, positions: int) -> bool:
        """Move up to so many positions of the switches under way; whether there is more to move."""
        return self._switches.work(positions)

    def stats(self) -> dict[str, int]:
        """Gauges and counters by name."""
        return self._switches.stats() | {"positions_watched": len(self._watch)}

    def nbytes(self, number: int) -> float:
        """RAM of a sequence beside its blocks' own."""
        return self._switches.of(number).sequence.nbytes()

    # Checks.

    def _entry_with(self, number: int, begin: int, end: int | None) -> Entry:
        entry = self._switches.of(number)
        length = entry.sequence.length
        if not 0 <= begin <= (length if end is None else end) <= length:
            raise ValueError(f"positions {begin}..{end} are not within 0..{length} of sequence {number}")
        return entry

    def _entry_with_tokens(self, number: int, begin: int, end: int) -> Entry:
        entry = self._switches.of(number)
        tokens = entry.sequence.length * entry.sequence.block_tokens
        if not 0 <= begin <= end <= tokens:
            raise ValueError(f"tokens {begin}..{end} are not within 0..{tokens} of sequence {number}")
        return entry


def _check_growth(length: int, more: int) -> None:
    if length + more > POSITIONS_MAX:
        raise ValueError(f"{more} blocks after {length} are over the {POSITIONS_MAX} of a sequence")


def _check_placed(hybrid: HybridIndex, begin: int, end: int) -> None:
    placed = hybrid.placed(begin, end)
    if len(placed) != hybrid.overlapping(begin, end).size:
        raise ValueError(f"tokens {begin}..{end} are not all in present blocks")
