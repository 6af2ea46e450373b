"""Sequences of the asynchronous client: the same operations as coroutines, on the same plans."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from types import TracebackType
from typing import Self

from kvtierd.core.keys import Keys
from kvtierd.protocol.aio_driver import AsyncDriver
from kvtierd.protocol.asking import Asking
from kvtierd.protocol.attention_messages import Loss
from kvtierd.protocol.attention_plans import ATTEND_TIMEOUT_S, Array, Attended, Options, OutputDtype, SequencePlans
from kvtierd.protocol.results import NamespaceHandle


class AsyncSequence:
    """As `Sequence`, for `async with`."""

    def __init__(self, driver: AsyncDriver, plans: SequencePlans, timeout_s: float) -> None:
        self._driver = driver
        self._plans = plans
        self._timeout_s = timeout_s

    @property
    def count(self) -> int:
        """Blocks of the sequence."""
        return self._plans.count

    async def extend(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        """As `Sequence.extend`."""
        return await self._driver.run(self._plans.extend(keys, self._deadline_ns(timeout_s)))

    async def attend(
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
        """As `Sequence.attend`."""
        lengths = () if length is None else (length,)
        options = Options(lengths, scale, causal, position, window, soft_cap, v_dim, output, loss)
        found = await self.attend_layers([layer], [q], None if sinks is None else [sinks], options, timeout_s=timeout_s)
        return found[0]

    async def attend_layers(
        self,
        layers: Many[int],
        queries: Many[Array],
        sinks: Many[Array] | None = None,
        options: Options | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[Attended]:
        """As `Sequence.attend_layers`."""
        plan = self._plans.attend(layers, queries, sinks, options or Options(), self._deadline_ns(timeout_s))
        return await self._driver.run(plan)

    def close(self) -> None:
        """As `Sequence.close`: it does not wait."""
        self._driver.post(self._plans.give_back)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _deadline_ns(self, timeout_s: float | None) -> int:
        return time.monotonic_ns() + int((self._timeout_s if timeout_s is None else timeout_s) * 1e9)


class AsyncAttention:
    """Part of AsyncClient, which has these."""

    _driver: AsyncDriver
    _asking: Asking
    attend_timeout_s: float = ATTEND_TIMEOUT_S
    """For what is asked of sequences: a long context on disk takes seconds. Set it on the client."""

    async def open_sequence(
        self, namespace: NamespaceHandle, keys: Keys, *, ttl_s: float | None = None, timeout_s: float | None = None
    ) -> AsyncSequence:
        """As `Client.open_sequence`."""
        chosen = self.attend_timeout_s if timeout_s is None else timeout_s
        plans = SequencePlans(self._asking, namespace, keys, 0 if ttl_s is None else max(1, int(ttl_s * 1000)))
        await self._driver.run(plans.open(time.monotonic_ns() + int(chosen * 1e9)))
        return AsyncSequence(self._driver, plans, chosen)
