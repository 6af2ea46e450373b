"""The past of a batch of rows as attention over it: one sequence for each run of blocks, asked once for all its rows.

Every query of a step stands behind every block, so all of a run's blocks are seen by all queries: rows are simply more
queries. What the runs of a row answer is merged by log-sum-exp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtierd.connectors.offloaded_store import OffloadedBlocks
from kvtierd.connectors.offloaded_table import Numbers, Run
from kvtierd.core.errors import KvtierdError
from kvtierd.core.units import MIB
from kvtierd.protocol.attention import Sequence as AttendedSequence
from kvtierd.protocol.attention_batch import AttendMany
from kvtierd.protocol.attention_plans import Attended, Options

Array = npt.NDArray[Any]

QUERIES_BYTES = 32 * MIB
"""Queries of one request, as fp32: half of what the daemon takes."""


@dataclasses.dataclass(slots=True)
class _Open:
    run: Run
    sequence: AttendedSequence


class Past:
    """Open sequences over the runs of a table."""

    def __init__(self, blocks: OffloadedBlocks) -> None:
        self._blocks = blocks
        self._open: dict[int, _Open] = {}
        """By first block: a block lies in one run only."""
        self.counters = {"attends": 0, "sequences": 0}

    def follow(self, runs: Sequence[Run]) -> None:
        """Have sequences over these runs: what grew is extended, what is new is opened, what is over is closed.

        Raises OffloadError; then it is as it was before.
        """
        following = {int(run.blocks[0]): self._followed(self._open.get(int(run.blocks[0])), run) for run in runs}
        before, self._open = self._open, following
        kept = {id(item.sequence) for item in following.values()}
        for item in before.values():
            if id(item.sequence) not in kept:
                item.sequence.close()

    def begin(self, layer: int, q: Array, scale: float) -> PendingPast:
        """Ask for attention of q ([rows, queries, heads, k_dim], float32, float16, or bf16 as uint16) over the past.

        Raises OffloadError.
        """
        step = max(1, QUERIES_BYTES // (4 * q[:, :1].size))
        pieces = [slice(at, min(at + step, q.shape[1])) for at in range(0, q.shape[1], step)]
        return PendingPast(self, layer, q, scale, [(item, piece) for piece in pieces for item in self._open.values()])

    def ask(self, layer: int, q: Array, scale: float, asked: Sequence[tuple[_Open, slice]]) -> AttendMany:
        """Send the requests."""
        size = self._blocks.geometry.block_size
        asks = [
            item.sequence.ask(
                layer,
                q[item.run.rows, piece].reshape(-1, *q.shape[2:]),
                # A sequence may know more blocks than the run has: those of a change that failed half way.
                Options(scale=scale, causal=False, lengths=(len(item.run.blocks) * size,)),
            )
            for item, piece in asked
        ]
        self.counters["attends"] += len(asks)
        return self._blocks.client.attend_many(asks, timeout_s=self._blocks.timeout_s)

    def patiently(self, call: Any) -> Any:
        """As OffloadedBlocks.patiently."""
        return self._blocks.patiently(call)

    def close(self) -> None:
        """End all sequences."""
        for item in self._open.values():
            item.sequence.close()
        self._open.clear()

    def _followed(self, item: _Open | None, run: Run) -> _Open:
        if item is not None:
            known = len(item.run.blocks)
            if np.array_equal(item.run.blocks, run.blocks[:known]) and self._extended(item, run.blocks[known:]):
                return _Open(run, item.sequence)
        keys = self._blocks.keys(run.blocks)
        self.counters["sequences"] += 1
        timeout_s = self._blocks.timeout_s
        opened = self._blocks.patiently(
            lambda: self._blocks.client.open_sequence(self._blocks.handle, keys, timeout_s=timeout_s)
        )
        return _Open(run, opened)

    def _extended(self, item: _Open, more: Numbers) -> bool:
        """Whether it could be; if not, the daemon may have done it nevertheless: another one must be opened."""
        try:
            if more.size:
                item.sequence.extend(self._blocks.keys(more))
        except KvtierdError:
            return False
        return True


class PendingPast:
    """What was asked of the past, while the caller computes what it has itself."""

    def __init__(self, past: Past, layer: int, q: Array, scale: float, asked: Sequence[tuple[_Open, slice]]) -> None:
        self._past, self._layer, self._q, self._scale, self._asked = past, layer, q, scale, asked
        self._waited = False
        self._many: AttendMany = past.patiently(self._ask)

    def merge_into(self, output: Array, lse: Array) -> None:
        """Merge the answers into what was computed over other keys: float32 [rows, queries, heads, v_dim] and the
        natural log-sum-exp [rows, queries, heads], in place. Raises OffloadError; the arrays are of no use then."""
        for (item, piece), found in zip(self._asked, self._past.patiently(self._result), strict=True):
            rows = item.run.rows
            index = (rows, piece) if len(rows) < output.shape[0] else (slice(None), piece)
            shape = (len(rows), piece.stop - piece.start, output.shape[2])
            _merge(output, lse, index, found.output.reshape(*shape, -1), found.lse.reshape(shape))

    def close(self) -> None:
        """Give up what was not waited for."""
        self._many.close()

    def _ask(self) -> AttendMany:
        return self._past.ask(self._layer, self._q, self._scale, self._asked)

    def _result(self) -> list[Attended]:
        if self._waited:
            self._many = self._ask()  # as a whole: what was sent before was sent to a daemon that is gone
        self._waited = True
        return self._many.result()


def _merge(output: Array, lse: Array, index: Any, more: Array, more_lse: Array) -> None:
    """Merge attention over other keys into some rows. -Inf stands for no key at all, with an output of 0."""
    mine = lse[index]
    top = np.maximum(mine, more_lse)
    base = np.where(np.isneginf(top), 0, top)
    here, there = np.exp(mine - base), np.exp(more_lse - base)
    total = here + there
    share = np.divide(1, total, out=np.zeros_like(total), where=total > 0)
    output[index] = output[index] * (here * share)[..., None] + more * (there * share)[..., None]
    with np.errstate(divide="ignore"):
        lse[index] = base + np.log(total)
