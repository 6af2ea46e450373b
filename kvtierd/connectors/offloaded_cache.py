"""A cache for transformers whose past lives in the daemon: the last tokens are here, whole blocks before them there.

Columns are places in the padded batch, the same for all rows. Blocks are counted in a row's own tokens, without its
padding, so that padding is never stored; row r has the columns from `begins[r]` on here and those before in blocks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
import torch
from transformers import Cache

from kvtierd.connectors.cache_tensors import check_plain
from kvtierd.connectors.model_identity import empty_cache, model_name
from kvtierd.connectors.offloaded_attention import (
    GO_ON,
    NAME,
    Mask,
    OutsideOfGradients,
    attention_with_lse,
    plain_attention,
    visible,
)
from kvtierd.connectors.offloaded_layers import OffloadedLayer, Tails, as_queries
from kvtierd.connectors.offloaded_past import Past
from kvtierd.connectors.offloaded_store import OffloadedBlocks
from kvtierd.connectors.offloaded_table import BlockTable, Numbers
from kvtierd.protocol.client import Client

__all__ = ["OffloadedCache"]

_log = logging.getLogger(__name__)

LONG_PREFILL = 4096
"""Tokens in one forward pass beyond which it is worth saying that chunks would need less memory."""


class OffloadedCache(Cache):
    """Past of one generation after the other, for a model that was loaded with `attn_implementation="kvtierd"`.

        with OffloadedCache(Client(), model) as cache:
            model.generate(input_ids, past_key_values=cache, prefill_chunk_size=512)

    At least the last `tail_tokens` stay in this process, and with them what does not fill a block of `block_size` yet.
    `allow_loss` lets the daemon compress blocks to FP8. What the daemon cannot do just now is waited for `timeout_s`;
    then, or where a block is lost, OffloadError is raised, the cache is as it was before the forward pass, and nothing
    was computed from a part of the past. `close` deletes the blocks; those of a process that was killed are forgotten
    `ttl_s` after their last use. Not for several threads at once.

    Raises ValueError for a model that is not loaded with this attention, or whose layers are not plain attention.
    """

    def __init__(
        self,
        client: Client,
        model: Any,
        *,
        tail_tokens: int = 128,
        block_size: int = 128,
        allow_loss: bool = False,
        timeout_s: float = 30.0,
        ttl_s: int = 3600,
    ) -> None:
        check_offloadable(model)
        if tail_tokens < 1:
            raise ValueError(f"tail_tokens is {tail_tokens}; at least 1 is wanted")
        layers = [OffloadedLayer(self, index) for index in range(len(empty_cache(model).layers))]
        super().__init__(layers=layers)
        self._client = client
        self._name = model_name(model)
        self._connect = functools.partial(
            OffloadedBlocks, client, self._name, timeout_s=timeout_s, ttl_s=ttl_s, allow_loss=allow_loss
        )
        self._tails = Tails(layers, block_size, tail_tokens)
        self._blocks: OffloadedBlocks | None = None
        self._past: Past | None = None
        self._unattended: int | None = None
        """The layer whose keys were handed out last, until its attention is asked for."""
        self._clear()

    def _clear(self) -> None:
        self._table = BlockTable(0)
        self._pads: Numbers = np.zeros(0, np.int64)

    # What is asked about it

    @property
    def offloaded_blocks(self) -> int:
        """Blocks in the daemon; rows share those of a common beginning."""
        return self._blocks.count if self._blocks is not None else 0

    @property
    def offloaded_tokens(self) -> list[int]:
        """Of each row, the tokens whose KV is in the daemon."""
        return [int(count) * self._tails.block_size for count in self._table.counts]

    @property
    def attends(self) -> int:
        """Requests for attention so far."""
        return self._past.counters["attends"] if self._past is not None else 0

    # A forward pass

    def handing_out(self, index: int, rows: int) -> None:
        """A layer is about to hand out its keys. Raises RuntimeError where nobody attended to those of the last one,
        ValueError where the batch is another one."""
        last = self._unattended
        if last is not None:
            self._roll_back()
            raise RuntimeError(
                f"layer {last} computed its attention with something else than attn_implementation={NAME!r}, which "
                f"would leave out the past: call model.set_attn_implementation({NAME!r})"
            )
        if index == 0 and not self._tails.are_level:
            raise RuntimeError("a forward pass over this cache was interrupted: call reset() and start again")
        if len(self._table.counts) not in {0, rows}:
            raise ValueError(f"a batch of {rows} rows over a cache of {len(self._table.counts)}; reset() it first")
        self._unattended = index

    def attend(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Mask,
        scale: float,
        positions: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of one layer over the past and what is here: [rows, queries, heads, v_dim]."""
        self._unattended, before = None, self._tails.seen
        try:
            if index == 0:
                self._start(query.shape[0], mask)
                self._check_positions(positions, mask.q_offset + mask.q_length - 1)
            output = self._attention(index, query, key, value, mask, scale)
            if index == len(self.layers) - 1:
                self._tails.end_step()
                self._spill()
        except BaseException:
            self._tails.seen = before
            self._roll_back()
            raise
        return output

    def _start(self, rows: int, mask: Mask) -> None:
        """Note the padding of a forward pass. Raises ValueError where it is not that of the ones before."""
        if not len(self._table.counts):
            self._table, self._pads = BlockTable(rows), np.zeros(rows, np.int64)
        pads = np.zeros(rows, np.int64) if mask.pads is None else mask.pads.cpu().numpy().astype(np.int64)
        stored = self._table.counts > 0
        if (pads != self._pads)[stored].any() or (mask.padding is None and self._pads.any()):
            raise ValueError(
                f"the cache was filled with rows padded by {self._pads.tolist()} tokens, and now they are said to be "
                f"padded by {pads.tolist()}: pass the attention_mask of the whole batch"
            )
        self._pads = pads
        if mask.q_length > LONG_PREFILL:
            _log.info(
                "a prefill of %d tokens at once: their KV lies in this process until it has ended; with "
                "prefill_chunk_size=512 it goes to the daemon chunk by chunk",
                mask.q_length,
            )

    def _check_positions(self, positions: torch.Tensor | None, column: int) -> None:
        """Raise ValueError where the model's last positions are not those of the last column, with or without padding:
        the tokens are others than those that follow what is in the cache."""
        if positions is None or positions.ndim != 2:
            return
        last = positions[:, -1].cpu().numpy()
        if not ((last == column) | (last == column - self._pads)).all():
            raise ValueError(
                f"the last token has position {int(last[0])}, and the cache with it holds {column + 1} tokens: {GO_ON}"
            )

    def _attention(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Mask, scale: float
    ) -> torch.Tensor:
        first, begins = self._tails.first, torch.from_numpy(self._begins)
        if self._table.is_empty:
            return plain_attention(query, key, value, scale, first, mask.q_offset, begins)
        assert self._past is not None
        with contextlib.closing(self._past.begin(index, as_queries(query), scale)) as pending:
            allowed = visible(first, key.shape[2], mask.q_offset, query.shape[2], begins, key.device)
            output, lse = attention_with_lse(query, key, value, scale, allowed)
            merged = output.detach().cpu().numpy()
            pending.merge_into(merged, lse.detach().cpu().numpy())
        found: torch.Tensor = OutsideOfGradients.apply(query, torch.from_numpy(merged).to(query.device, query.dtype))
        return found

    @property
    def _begins(self) -> Numbers:
        """Of each row, the first column that is not in blocks and no padding."""
        return self._pads + self._table.counts * self._tails.block_size

    def _roll_back(self) -> None:
        """As before the forward pass."""
        self._unattended = None
        self._tails.roll_back()

    # Towards the daemon and back

    def _spill(self) -> None:
        """Store the whole blocks before the last tokens; then they are gone here. OffloadError: nothing is changed."""
        plan = self._tails.plan_spill(self._table, self._pads)
        if not plan:
            return
        blocks, past = self._connected()
        table, fresh = self._table.copy(), []
        try:
            for row, count, like in plan:
                if like is not None:
                    numbers = table.of_row(like)[self._table.counts[row] :][:count]
                else:
                    numbers = blocks.new(count)
                    fresh.append(numbers)
                    parent = int(table.of_row(row)[-1]) if table.counts[row] else None
                    begin = int(self._pads[row] + table.counts[row] * self._tails.block_size)
                    blocks.write(numbers, parent, self._tails.reader(row, begin))
                table.append(row, numbers)
            blocks.confirm(np.concatenate(fresh))
            past.follow(table.runs())
        except BaseException:
            blocks.forget(np.concatenate([np.empty(0, np.int64), *fresh]))
            raise
        self._table = table
        self._tails.drop_before(int(self._begins.min()))

    def _connected(self) -> tuple[OffloadedBlocks, Past]:
        if self._blocks is None or self._past is None:
            geometry = self._tails.geometry()
            self._blocks = self._connect(geometry=geometry)
            self._past = Past(self._blocks)
            _log.info(
                "the past of %s goes to kvtierd at %s in blocks of %d tokens (%d bytes); the last %d tokens stay here",
                self._name,
                self._client.endpoint,
                geometry.block_size,
                geometry.block_bytes,
                self._tails.tail_tokens,
            )
        return self._blocks, self._past

    def _follow(self) -> None:
        """The table is another one: rows moved or were cut."""
        if self._blocks is not None and self._past is not None:
            self._past.follow(self._table.runs())
            self._blocks.retain(self._table.live())

    # What generate does to a cache between forward passes

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes what row `beam_idx[i]` was: numbers of blocks move, and what is here."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, next to each other."""
        self._select(torch.arange(len(self._pads)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows only; a mask or numbers."""
        self._select(torch.arange(len(self._pads))[indices.cpu()])

    def _select(self, rows: torch.Tensor) -> None:
        numbers = rows.cpu().numpy().astype(np.int64)
        self._tails.select(rows)
        if np.array_equal(numbers, np.arange(len(self._pads))):
            return
        self._pads = self._pads[numbers]
        self._table.select(numbers)
        self._follow()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; a positive number is how many to leave, as transformers has it.

        What is left of a block that is cut comes back from the daemon. Raises OffloadError where it cannot: nothing is
        cropped then. ValueError for more tokens than there are.
        """
        seen = self.get_seq_length()
        left = seen + tokens_to_remove if tokens_to_remove <= 0 else min(seen, tokens_to_remove)
        if left < 0:
            raise ValueError(f"crop({tokens_to_remove}) of a cache that holds {seen} tokens")
        if left == 0:
            self.reset()
        elif left < seen:
            self._crop_to(left)

    def _crop_to(self, left: int) -> None:
        counts = np.minimum(self._table.counts, np.maximum(left - self._pads, 0) // self._tails.block_size)
        cut = np.flatnonzero(counts < self._table.counts)
        pieces = {}
        for row in cut.tolist():
            assert self._blocks is not None
            begin = int(self._pads[row] + counts[row] * self._tails.block_size)
            if begin < left:
                pieces[row] = (begin, self._blocks.read(int(self._table.of_row(row)[counts[row]])))
        self._tails.crop(left, pieces)
        if cut.size:
            self._table.truncate(counts)
            self._follow()

    # The end

    def reset(self) -> None:
        """Forget everything, here and in the daemon; the cache can be used again."""
        self._unattended = None
        self._tails.reset()
        self._clear()
        if self._past is not None and self._blocks is not None:
            self._past.close()
            self._blocks.retain(np.empty(0, np.int64))

    def close(self) -> None:
        """Forget everything, here and in the daemon."""
        self.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("an OffloadedCache cannot be copied: its blocks are in the daemon, once")


def check_offloadable(model: Any) -> None:
    """Raise ValueError for a model whose past cannot be kept like this."""
    if model.config.is_encoder_decoder:
        raise ValueError("encoder-decoder models are not supported: their cross attention has no causal past")
    check_plain(empty_cache(model))
    used = model.config.get_text_config(decoder=True)._attn_implementation
    if used != NAME:
        raise ValueError(
            f"the model's attention is {used!r}, which would not see the past: call register_offloaded_attention(), "
            f"then load it with attn_implementation={NAME!r} or call model.set_attn_implementation({NAME!r})"
        )
