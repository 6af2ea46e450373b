"""A cache for transformers whose past lives in the daemon: the last tokens are here, whole blocks before them there."""

from __future__ import annotations

import contextlib
import functools
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from transformers import Cache, DynamicCache

from kvtierd.connectors.cache_tensors import check_plain
from kvtierd.connectors.model_identity import empty_cache, model_name
from kvtierd.connectors.offloaded_attention import (
    NAME,
    Mask,
    OutsideOfGradients,
    attention_with_lse,
    offloaded_mask,
    plain_attention,
    visible,
)
from kvtierd.connectors.offloaded_layers import OffloadedLayer, Tails, as_queries
from kvtierd.connectors.offloaded_rows import Rows
from kvtierd.connectors.offloaded_store import OffloadedBlocks
from kvtierd.connectors.offloaded_table import Numbers
from kvtierd.protocol.client import Client


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
        self._tails = Tails(layers, block_size, tail_tokens)
        self._rows = Rows(
            self._tails,
            functools.partial(
                OffloadedBlocks, client, model_name(model), timeout_s=timeout_s, ttl_s=ttl_s, allow_loss=allow_loss
            ),
        )
        self._unattended: int | None = None
        """The layer whose keys were handed out last, until its attention is asked for."""

    # What is asked about it

    @property
    def offloaded_blocks(self) -> int:
        """Blocks in the daemon; rows share those of a common beginning."""
        return self.blocks.count if self.blocks is not None else 0

    @property
    def offloaded_tokens(self) -> list[int]:
        """Of each row, the tokens whose KV is in the daemon."""
        return [int(count) * self._tails.block_size for count in self._rows.table.counts]

    @property
    def blocks(self) -> OffloadedBlocks | None:
        """What lies in the daemon; None before the first block does."""
        return self._rows.blocks

    def blocks_of(self, row: int) -> Numbers:
        """Numbers of a row's blocks, in order."""
        return self._rows.table.of_row(row)

    @property
    def attends(self) -> int:
        """Requests for attention so far."""
        return self._rows.past.counters["attends"] if self._rows.past is not None else 0

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
        if self._rows.count not in {0, rows}:
            raise ValueError(f"a batch of {rows} rows over a cache of {self._rows.count}; reset() it first")
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
                self._rows.start(query.shape[0], mask, positions)
            output = self._attention(index, query, key, value, mask, scale)
            if index == len(self.layers) - 1:
                self._tails.end_step()
                self._rows.spill()
        except BaseException:
            self._tails.seen = before
            self._roll_back()
            raise
        return output

    def _attention(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Mask, scale: float
    ) -> torch.Tensor:
        first, begins = self._tails.first, torch.from_numpy(self._rows.begins)
        if self._rows.table.is_empty:
            return plain_attention(query, key, value, scale, first, mask.q_offset, begins)
        with contextlib.closing(self._rows.attended().begin(index, as_queries(query), scale)) as pending:
            allowed = visible(first, key.shape[2], mask.q_offset, query.shape[2], begins, key.device)
            output, lse = attention_with_lse(query, key, value, scale, allowed)
            merged = output.detach().cpu().numpy()
            pending.merge_into(merged, lse.detach().cpu().numpy())
        found: torch.Tensor = OutsideOfGradients.apply(query, torch.from_numpy(merged).to(query.device, query.dtype))
        return found

    def _roll_back(self) -> None:
        """As before the forward pass."""
        self._unattended = None
        self._tails.roll_back()

    # What generate does to a cache between forward passes

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes what row `beam_idx[i]` was: numbers of blocks move, and what is here."""
        self._rows.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, next to each other."""
        self._rows.select(torch.arange(self._rows.count).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows only; a mask or numbers."""
        self._rows.select(torch.arange(self._rows.count)[indices.cpu()])

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
            self._rows.crop(left)

    def adopt(self, cache: Any, attention_mask: torch.Tensor | None = None) -> None:
        """Take over what a plain cache of this model holds, as if it had been computed over this one, which is empty.

        `attention_mask` ([rows, tokens]) where rows are padded on the left. The plain cache stays as it is. Raises
        ValueError where one of the two is not so, OffloadError as a forward pass does.
        """
        if self.get_seq_length() or type(cache) is not DynamicCache or len(cache.layers) != len(self.layers):
            raise ValueError(
                f"adopt wants an empty OffloadedCache and a DynamicCache of {len(self.layers)} layers; it is given a "
                f"{type(cache).__name__}, and holds {self.get_seq_length()} tokens"
            )
        mask = offloaded_mask(q_length=cache.get_seq_length(), attention_mask=attention_mask)
        try:
            for layer, other in zip(self.layers, cache.layers, strict=True):
                layer.hold(other.keys, other.values)
            self._rows.start(cache.layers[0].keys.shape[0], mask, None)
            self._tails.end_step()
            self._rows.spill()
        except BaseException:
            self.reset()
            raise

    # The end

    def reset(self) -> None:
        """Forget everything, here and in the daemon; the cache can be used again."""
        self._unattended = None
        self._rows.reset()

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
