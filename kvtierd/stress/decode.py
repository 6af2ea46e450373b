"""Decode: the worker's side asks for attention step by step and layer by layer; the parent's judges the answers."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtierd.stress.content import BlockId, Content
from kvtierd.stress.oracle import Asked, Oracle, queries

if TYPE_CHECKING:
    from kvtierd.stress.worker import Tools

TOLERANCE = 1e-4
"""Of the largest relative L2 error of a head's output, and of the log-sum-exp's error. The kernel sums in float32; a
block that is missing, of a million tokens, changes heads that weigh all alike by about 1e-2."""
TOLERANCE_LOSSY, LSE_TOLERANCE_LOSSY = 9e-3, 3e-2
"""The same where blocks have been through FP8. The oracle has keys as the codes stand for them, rotated; of a block
that the daemon has decoded they were turned back and rounded to bf16 too, and a reply does not say which it was. That
moves heads that look for one token by some 4e-3, their log-sum-exp by 6e-3, and the others by less."""


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """Every `stride`-th block of the long context, from block `first` on."""

    first: int
    stride: int

    def names(self, blocks: int) -> list[BlockId]:
        """Its blocks, of a context of so many."""
        return [BlockId(0, number) for number in range(self.first, blocks, self.stride)]


def contexts(stride: int, blocks: int) -> list[Context]:
    """The whole context, and the `stride` shorter ones that it consists of; none of these where they would be empty."""
    shorter = [Context(first, stride) for first in range(stride)] if blocks // stride >= 2 else []
    return [Context(0, 1), *shorter]


class _Decoding:
    """One context's sequence, with the queries of all its steps."""

    def __init__(self, tools: Tools, context: Context, command: Mapping[str, Any], stack: contextlib.ExitStack) -> None:
        self._tools, self._context = tools, context
        self._layers, self._steps = command["layers"], command["steps"]
        names = context.names(tools.blocks)
        self._asked = [
            [queries(tools.content, names, layer, step, tools.heads)[0] for layer in self._layers]
            for step in range(self._steps)
        ]
        keys = tools.keys[np.array([name.index for name in names])]
        self._sequence = stack.enter_context(
            tools.client.open_sequence(tools.handle, keys, timeout_s=command["timeout_s"])
        )
        self._total = len(names) * tools.content.geometry.block_size

    def step(self, step: int) -> list[dict[str, Any]]:
        """Attend with all layers; a step below 0 is for warming up, and its answers are those of step 0."""
        at, found = max(step, 0), []
        length = self._total - self._steps + 1 + at
        for place, layer in enumerate(self._layers):
            before = _stats(self._tools)
            begin_s = time.perf_counter()
            attended = self._sequence.attend(layer, self._asked[at][place][None], length=length)
            seconds = time.perf_counter() - begin_s
            answer = _answer(step, layer, length, seconds, attended) | dataclasses.asdict(self._context)
            found.append(answer | {"parts": _difference(before, _stats(self._tools))})
        self._tools.tell(progress=1)
        return found


def decode(tools: Tools, command: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Attend over the whole context and over the `stride` shorter ones that it consists of, in turns.

    In each of `steps` rounds all `layers` of the whole context are asked for, then those of each shorter one, so that
    both ways read the same blocks within seconds of each other: a disk that drifts, or a machine below it that keeps
    what was read last, drifts for both. Each step sees one token more. `warmup` rounds come first.
    """
    with contextlib.ExitStack() as stack:
        all_of_them = [
            _Decoding(tools, context, command, stack) for context in contexts(command["stride"], tools.blocks)
        ]
        return [
            answer
            for step in range(-command["warmup"], command["steps"])
            for decoding in all_of_them
            for answer in decoding.step(step)
            if step >= 0
        ]


def _stats(tools: Tools) -> dict[str, int]:
    return {name: value for name, value in tools.client.stats().items() if name.startswith(("attend_", "nvme_read"))
            and isinstance(value, int)}  # fmt: skip


def _difference(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: value - before.get(name, 0) for name, value in after.items()}


def _answer(step: int, layer: int, length: int, seconds: float, attended: Any) -> dict[str, Any]:
    return {
        "step": step,
        "layer": layer,
        "length": length,
        "seconds": seconds,
        "output": base64.b64encode(attended.output.tobytes()).decode(),
        "lse": base64.b64encode(attended.lse.tobytes()).decode(),
        "lossy": attended.lossy.tolist(),
    }


@dataclasses.dataclass(slots=True)
class Judged:
    """What the oracle says to a set of answers."""

    checked: int = 0
    wrong: int = 0
    error: float = 0.0
    """The largest relative L2 error of a head against the values that the daemon had: exact ones, or FP8's."""
    lossy_error: float = 0.0
    """The same against the exact values: what FP8 costs."""
    findings: list[str] = dataclasses.field(default_factory=list)


def judge(
    content: Content,
    heads: int,
    context: Context,
    blocks: int,
    answers: Sequence[Mapping[str, Any]],
    threads: int,
    tell: Callable[[int], None] = lambda _blocks: None,
) -> Judged:
    """Compare answers of `decode` over one context with the oracle, layer by layer.

    What FP8 costs is judged over the whole context only: that wants another pass, over exact values.
    """
    oracle, judged = Oracle(content, heads, threads), Judged()
    names = context.names(blocks)
    for layer in sorted({answer["layer"] for answer in answers}):
        mine = [answer for answer in answers if answer["layer"] == layer]
        asked = [_asked(content, names, heads, answer) for answer in mine]
        _compare(judged, mine, *oracle.attend(layer, names, asked, tell))
        if context.stride == 1 and any(step.lossy.any() for step in asked):
            exact = [dataclasses.replace(step, lossy=np.zeros_like(step.lossy)) for step in asked[:1]]
            output, _ = oracle.attend(layer, names, exact, tell)
            judged.lossy_error = max(judged.lossy_error, _relative(_output(mine[0]), output[0]))
    return judged


def _asked(content: Content, names: Sequence[BlockId], heads: int, answer: Mapping[str, Any]) -> Asked:
    q, _ = queries(content, names, answer["layer"], answer["step"], heads)
    lossy = np.zeros(len(names), np.bool_)
    lossy[answer["lossy"]] = True
    return Asked(q, answer["length"], lossy)


def _compare(judged: Judged, answers: Sequence[Mapping[str, Any]], output: Any, lse: Any) -> None:
    for answer, wanted, wanted_lse in zip(answers, output, lse, strict=True):
        got_lse = np.frombuffer(base64.b64decode(answer["lse"]), np.float32)
        error = _relative(_output(answer), wanted)
        lse_error = float(np.max(np.abs(got_lse - wanted_lse)))
        judged.checked += 1
        judged.error = max(judged.error, error)
        allowed, lse_allowed = (TOLERANCE_LOSSY, LSE_TOLERANCE_LOSSY) if answer["lossy"] else (TOLERANCE, TOLERANCE)
        if not (error <= allowed and lse_error <= lse_allowed):  # NaN is wrong too
            judged.wrong += 1
            judged.findings.append(
                f"step {answer['step']} layer {answer['layer']}: relative error {error:.2g}, of the log-sum-exp "
                f"{lse_error:.2g}; {allowed} and {lse_allowed} are allowed"
            )


def _output(answer: Mapping[str, Any]) -> Any:
    return np.frombuffer(base64.b64decode(answer["output"]), np.float32)


def _relative(got: Any, wanted: Any) -> float:
    """The largest relative L2 error of a head; wanted is [heads, v_dim]."""
    difference = np.linalg.norm(got.reshape(wanted.shape) - wanted, axis=-1)
    return float(np.max(difference / np.linalg.norm(wanted, axis=-1)))
