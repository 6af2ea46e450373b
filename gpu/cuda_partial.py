"""What is carried of an answer that a GPU helps to compute, and its queries as kernels want them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from kvtierd.core.stored_form import rotation
from kvtierd.gpu.attend import Array, Query, rotated, to_fp32
from kvtierd.gpu.cuda_interface import View
from kvtierd.gpu.cuda_scratch import Mirror
from kvtierd.gpu.kernels.attention_common import NUMBERS

_Q_MAX_EXPONENT = 8
"""Largest query element on tensor cores is brought under two to this, so that its lower half is a normal fp16."""


@dataclasses.dataclass(slots=True, eq=False)
class Pass:
    """Queries that go over the blocks together: of the CPU's carried state `state`, and what kernels are told.

    `forms` are the vectors as they are and, where the codec rotates keys, rotated: each with the exponent of the power
    of two that brings them into fp16's range.
    """

    state: Any
    numbers: Array
    forms: list[tuple[Array, int]]
    finite: bool

    def form(self, *, coded: bool) -> tuple[Array, int]:
        """The vectors for blocks that are as the engine gave them, or as the codec made them."""
        return self.forms[-1 if coded else 0]

    @property
    def rows(self) -> int:
        """Query vectors."""
        return int(self.state.top.size)


class CudaPartial:
    """An answer in the making. Not to be added to by two threads at once."""

    def __init__(self, query: Query, on_host: Any) -> None:
        self.query, self.on_host = query, on_host
        self.passes: list[Pass] = []
        first = 0
        for state in on_host.passes:
            self.passes.append(_make_pass(query, state, first))
            first += int(state.shape.queries)

    def result(self, dtype: str = "fp32") -> tuple[Array, Array]:
        """As `Partial.result`."""
        found: tuple[Array, Array] = self.on_host.result(dtype)
        return found


class Queries:
    """Query vectors on the device: brought there when a launch wants them, once for each form of kernel."""

    def __init__(self, mirror: Mirror, stream: Any, passes: list[Pass]) -> None:
        self._mirror, self._stream, self._passes = mirror, stream, passes
        self._there: dict[tuple[int, bool, bool], View] = {}

    def of(self, number: int, *, on_tensors: bool, coded: bool) -> View:
        """Those of a pass for coded blocks or others; for tensor cores divided by their power of two."""
        wanted = number, on_tensors, coded
        if wanted not in self._there:
            q, exponent = self._passes[number].form(coded=coded)
            (self._there[wanted],) = self._mirror.put((np.ldexp(q, -exponent) if on_tensors else q,), self._stream)
        return self._there[wanted]


def _make_pass(query: Query, state: Any, first: int) -> Pass:
    shape, unit = state.shape, query.soft_cap or math.log(2.0)
    numbers = np.zeros(NUMBERS, np.int64)
    numbers[:11] = (
        shape.heads, shape.group, shape.queries, shape.position, shape.window, shape.k_token, shape.k_head,
        shape.v_token, shape.v_head, shape.v_start, shape.v_scale,
    )  # fmt: skip
    with np.errstate(over="ignore", invalid="ignore"):
        q = to_fp32(query.q[first : first + shape.queries]) * np.float32(query.scale / unit)
    q = q.reshape(shape.queries, shape.heads, shape.group, shape.k_dim).transpose(1, 0, 2, 3)
    forms, finite = [], True
    for spread in sorted({1, rotation(query.geometry)}):
        turned = rotated(np.ascontiguousarray(q), spread)
        largest = float(np.abs(turned).max(initial=0.0))
        finite = finite and math.isfinite(largest)
        exponent = min(max(math.frexp(largest)[1] - _Q_MAX_EXPONENT, -126), 127) if finite and largest else 0
        forms.append((turned.reshape(-1), exponent))
    return Pass(state, numbers, forms, finite)
