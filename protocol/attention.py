"""Sequences of the synchronous client: attention computed by the daemon, over blocks wherever they lie."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from types import TracebackType
from typing import Self

from kvtierd.core.keys import Keys
from kvtierd.protocol.asking import Asking
from kvtierd.protocol.attention_batch import AttendBatch, AttendMany, AttendOne
from kvtierd.protocol.attention_messages import Loss
from kvtierd.protocol.attention_plans import ATTEND_TIMEOUT_S, Array, Attended, Options, OutputDtype, SequencePlans
from kvtierd.protocol.results import NamespaceHandle
from kvtierd.protocol.waiting import Driver


class Sequence:
    """Blocks that queries are asked about, of `Client.open_sequence`; as a context manager it ends with the block.

    It outlives the daemon: where that is another one, or the sequence had ended there by time, it is opened again.
    """

    def __init__(self, driver: Driver, plans: SequencePlans, timeout_s: float) -> None:
        self._driver = driver
        self._plans = plans
        self._timeout_s = timeout_s

    @property
    def count(self) -> int:
        """Blocks of the sequence."""
        return self._plans.count

    def extend(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Add blocks behind the last one; how many there are then. Raises RequestError where one is not present."""
        return self._driver.run(self._plans.extend(keys, self._deadline_ns(timeout_s)))

    def attend(
        self,
        layer: int,
        q: Array,
        *,
        length: int | None = None,
        scale: float | None = None,
        causal: bool = True,
        position: int | None = None,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: Array | None = None,
        v_dim: int = 0,
        output: OutputDtype = "fp32",
        loss: Loss = "any",
        timeout_s: float | None = None,
    ) -> Attended:
        """Exact attention of q over the first `length` tokens (all by default) of one layer.

        q is [queries, heads, k_dim] in float32, float16, or bf16 as uint16. Query i stands at `position` + i, by
        default so that the last one is the last token; where `causal` it sees the keys up to its own position, the last
        `window` of them where that is not 0. `scale` multiplies scores (default 1 / sqrt(k_dim)), `soft_cap` c makes
        them c * tanh(score / c), `sinks` float32 [heads] are scores without a value. `v_dim` is that of a latent form.
        `output` is the dtype of the output, "" that of q. `loss` matters in namespaces that allow it: a copy in FP8
        stands in for an exact one wherever it is nearer (`any`), only while the host tier thrashes (`pressure`), or
        never (`none`, and then a block without an exact copy is an error); `lossy` of what is returned names them.

        Raises ValueError and RequestError for what cannot be computed, RequestError `not_present` or
        `checksum_mismatch` naming a block that is lost, Unavailable where the daemon cannot answer now.
        """
        lengths = () if length is None else (length,)
        options = Options(lengths, scale, causal, position, window, soft_cap, v_dim, output, loss)
        return self.attend_layers([layer], [q], None if sinks is None else [sinks], options, timeout_s=timeout_s)[0]

    def attend_layers(
        self,
        layers: Many[int],
        queries: Many[Array],
        sinks: Many[Array] | None = None,
        options: Options | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[Attended]:
        """As `attend` for several layers in one request, each with queries of its own, of the same shape."""
        chosen = options or Options()
        return self._driver.run(self._plans.attend(layers, queries, sinks, chosen, self._deadline_ns(timeout_s)))

    def ask(self, layer: int, q: Array, options: Options) -> AttendOne:
        """As `attend`, as one of those that `Client.attend_many` takes. Raises ValueError for what is no query."""
        return AttendOne(self._plans, *self._plans.prepare([layer], [q], None, options))

    def close(self) -> None:
        """End it; does not wait, and a second call does nothing."""
        self._driver.post(self._plans.give_back)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _deadline_ns(self, timeout_s: float | None) -> int:
        return time.monotonic_ns() + int((self._timeout_s if timeout_s is None else timeout_s) * 1e9)


class SyncAttention:
    """Part of Client, which has these."""

    _driver: Driver
    _asking: Asking
    attend_timeout_s: float = ATTEND_TIMEOUT_S
    """For what is asked of sequences: a long context on disk takes seconds. Set it on the client."""

    def open_sequence(
        self, namespace: NamespaceHandle, keys: Keys, *, ttl_s: float | None = None, timeout_s: float | None = None
    ) -> Sequence:
        """Open a sequence of stored blocks, to compute attention over them where they lie.

        Its blocks stay where they are until it is closed or nothing was asked of it for `ttl_s`. Deadlines of what is
        asked of it are `timeout_s`, by default `attend_timeout_s`. Raises RequestError `not_present` naming the first
        key that is not stored, Unavailable without a daemon.
        """
        chosen = self._attend_timeout_s(timeout_s)
        plans = SequencePlans(self._asking, namespace, keys, 0 if ttl_s is None else max(1, int(ttl_s * 1000)))
        self._driver.run(plans.open(time.monotonic_ns() + int(chosen * 1e9)))
        return Sequence(self._driver, plans, chosen)

    def attend_many(self, asks: Many[AttendOne], *, timeout_s: float | None = None) -> AttendMany:
        """Send what `Sequence.ask` made, of several sequences, and do not wait: `result` of what is returned does.

        Raises Unavailable without a daemon, RequestError where a sequence must be opened again and cannot be.
        """
        deadline_ns = time.monotonic_ns() + int(self._attend_timeout_s(timeout_s) * 1e9)
        return AttendMany(self._driver, AttendBatch(self._asking, asks, deadline_ns))

    def _attend_timeout_s(self, timeout_s: float | None) -> float:
        return self.attend_timeout_s if timeout_s is None else timeout_s
