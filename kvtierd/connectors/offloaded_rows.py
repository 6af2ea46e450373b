"""The rows of an OffloadedCache: what is here, what is in the daemon, and how it moves between the two.

Columns are places in the padded batch, the same for all rows. Blocks are counted in a row's own tokens, without its
padding, so that padding is never stored; row r has the columns from `begins[r]` on here and those before in blocks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator

import numpy as np
import torch

from kvtierd.connectors.offloaded_attention import GO_ON, Mask
from kvtierd.connectors.offloaded_layers import Tails
from kvtierd.connectors.offloaded_past import Past
from kvtierd.connectors.offloaded_store import NewBlock, OffloadedBlocks
from kvtierd.connectors.offloaded_table import BlockTable, Numbers
from kvtierd.core.geometry import Geometry

_log = logging.getLogger(__name__)

LONG_PREFILL = 4096
"""Tokens in one forward pass beyond which it is worth saying that chunks would need less memory."""


class Rows:
    """`connect` makes the blocks' side when the first block is to go. `pads` is how many columns a row begins with that
    are no tokens."""

    def __init__(self, tails: Tails, connect: Callable[[Geometry], OffloadedBlocks]) -> None:
        self._tails = tails
        self._connect = connect
        self.blocks: OffloadedBlocks | None = None
        self.past: Past | None = None
        self.table = BlockTable(0)
        self.pads: Numbers = np.zeros(0, np.int64)
        self._behind = False
        """Whether the sequences are those of an earlier table: the daemon was away when it changed."""

    @property
    def count(self) -> int:
        """How many rows; 0 before the first forward pass."""
        return len(self.table.counts)

    @property
    def begins(self) -> Numbers:
        """Of each row, the first column that is not in blocks and no padding."""
        return self.pads + self.table.counts * self._tails.block_size

    def start(self, rows: int, mask: Mask, positions: torch.Tensor | None) -> None:
        """Note the padding of a forward pass. Raises ValueError where it is not that of the ones before, or where the
        model's last positions are not those of the last column: these are not the tokens that follow."""
        if not self.count:
            self.table, self.pads = BlockTable(rows), np.zeros(rows, np.int64)
        pads = np.zeros(rows, np.int64) if mask.pads is None else mask.pads.cpu().numpy().astype(np.int64)
        stored = self.table.counts > 0
        if (pads != self.pads)[stored].any() or (mask.padding is None and self.pads.any()):
            raise ValueError(
                f"the cache was filled with rows padded by {self.pads.tolist()} tokens, and now they are said to be "
                f"padded by {pads.tolist()}: pass the attention_mask of the whole batch"
            )
        _check_positions(positions, mask.q_offset + mask.q_length - 1, pads)
        self.pads = pads
        if mask.q_length > LONG_PREFILL:
            _log.info(
                "a prefill of %d tokens at once: their KV lies in this process until it has ended; with "
                "prefill_chunk_size=512 it goes to the daemon chunk by chunk",
                mask.q_length,
            )

    def spill(self) -> None:
        """Store the whole blocks before the last tokens; then they are gone here. OffloadError: nothing is changed."""
        plan = self._tails.plan_spill(self.table, self.pads)
        if not plan:
            return
        blocks, past = self._connected()
        table, fresh = self.table.copy(), list[NewBlock]()
        try:
            for row, count, like in plan:
                if like is not None:
                    numbers = table.of_row(like)[self.table.counts[row] :][:count]
                else:
                    numbers = blocks.new(count)
                    fresh += self._new_blocks(row, numbers, table)
                table.append(row, numbers)
            blocks.store(fresh)
            past.follow(table.runs())
            self._behind = False
        except BaseException:
            blocks.forget(item.number for item in fresh)
            raise
        self.table = table
        self._tails.drop_before(int(self.begins.min()))

    def select(self, rows: torch.Tensor) -> None:
        """Make the rows these, which may repeat: numbers of blocks move, and what is here."""
        numbers = rows.cpu().numpy().astype(np.int64)
        self._tails.select(rows)
        if np.array_equal(numbers, np.arange(self.count)):
            return
        self.pads = self.pads[numbers]
        self.table.select(numbers)
        self._follow()

    def crop(self, left: int) -> None:
        """Leave the first `left` columns. What is left of a block that is cut comes back. Raises OffloadError."""
        counts = np.minimum(self.table.counts, np.maximum(left - self.pads, 0) // self._tails.block_size)
        cut = np.flatnonzero(counts < self.table.counts)
        pieces = {}
        for row in cut.tolist():
            assert self.blocks is not None
            begin = int(self.pads[row] + counts[row] * self._tails.block_size)
            if begin < left:
                pieces[row] = (begin, self.blocks.read(int(self.table.of_row(row)[counts[row]])))
        self._tails.crop(left, pieces)
        if cut.size:
            self.table.truncate(counts)
            self._follow()

    def reset(self) -> None:
        """Forget everything, here and in the daemon."""
        self._tails.reset()
        self.table, self.pads, self._behind = BlockTable(0), np.zeros(0, np.int64), False
        if self.past is not None and self.blocks is not None:
            self.past.close()
            self.blocks.retain(np.empty(0, np.int64))

    def _new_blocks(self, row: int, numbers: Numbers, table: BlockTable) -> Iterator[NewBlock]:
        """The next blocks of a row, behind those that it has in the table."""
        before = int(table.of_row(row)[-1]) if table.counts[row] else None
        begin = int(self.pads[row] + table.counts[row] * self._tails.block_size)
        for number in numbers.tolist():
            yield NewBlock(number, before, functools.partial(self._tails.arrays, row, begin))
            before, begin = number, begin + self._tails.block_size

    def _connected(self) -> tuple[OffloadedBlocks, Past]:
        if self.blocks is None or self.past is None:
            geometry = self._tails.geometry()
            self.blocks = self._connect(geometry)
            self.past = Past(self.blocks)
            _log.info(
                "the past of %s goes to kvtierd at %s in blocks of %d tokens (%d bytes); the last %d tokens stay here",
                self.blocks.handle.namespace.model,
                self.blocks.client.endpoint,
                geometry.block_size,
                geometry.block_bytes,
                self._tails.tail_tokens,
            )
        return self.blocks, self.past

    def attended(self) -> Past:
        """The past, as attention may be asked over it: over what the table says. Raises OffloadError."""
        if self._behind:
            self._follow()
        assert self.past is not None
        return self.past

    def _follow(self) -> None:
        """The table is another one: rows moved or were cut."""
        if self.blocks is not None and self.past is not None:
            self._behind = True
            self.past.follow(self.table.runs())
            self._behind = False
            self.blocks.retain(self.table.live())


def _check_positions(positions: torch.Tensor | None, column: int, pads: Numbers) -> None:
    if positions is None or positions.ndim != 2:
        return
    last = positions[:, -1].cpu().numpy()
    nothing_yet = pads > column  # a chunk of padding alone: its positions mean nothing
    if not (nothing_yet | (last == column) | (last == column - pads)).all():
        raise ValueError(
            f"the last token has position {int(last[0])}, and the cache with it holds {column + 1} tokens: {GO_ON}"
        )
