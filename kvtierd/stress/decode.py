"""Decode: the worker's side asks for attention step by step and layer by layer; the parent's judges the answers."""

from __future__ import annotations

import base64
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


def decode(tools: Tools, command: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Attend over every `stride`-th block: `steps` steps of all `layers`, each step seeing one token more."""
    numbers = np.arange(0, tools.blocks, command["stride"])
    names = [BlockId(0, int(number)) for number in numbers]
    layers, steps = command["layers"], command["steps"]
    asked = [[queries(tools.content, names, layer, step, tools.heads)[0] for layer in layers] for step in range(steps)]
    total, found = len(names) * tools.content.geometry.block_size, []
    with tools.client.open_sequence(tools.handle, tools.keys[numbers], timeout_s=command["timeout_s"]) as sequence:
        for step in range(-command["warmup"], steps):
            for place, layer in enumerate(layers):
                length = total - steps + 1 + max(step, 0)
                before = _stats(tools)
                begin_s = time.perf_counter()
                attended = sequence.attend(layer, asked[max(step, 0)][place][None], length=length)
                seconds = time.perf_counter() - begin_s
                if step >= 0:
                    answer = _answer(step, layer, length, seconds, attended)
                    found.append(answer | {"parts": _difference(before, _stats(tools))})
            tools.tell(progress=1)
    return found


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
    stride: int,
    blocks: int,
    answers: Sequence[Mapping[str, Any]],
    threads: int,
    tell: Callable[[int], None] = lambda _blocks: None,
) -> Judged:
    """Compare answers of `decode` with the oracle, layer by layer."""
    oracle, judged = Oracle(content, heads, threads), Judged()
    names = [BlockId(0, number) for number in range(0, blocks, stride)]
    for layer in sorted({answer["layer"] for answer in answers}):
        mine = [answer for answer in answers if answer["layer"] == layer]
        asked = [_asked(content, names, heads, answer) for answer in mine]
        _compare(judged, mine, *oracle.attend(layer, names, asked, tell))
        if any(step.lossy.any() for step in asked):
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
        if not (error <= TOLERANCE and lse_error <= TOLERANCE):  # NaN is wrong too
            judged.wrong += 1
            judged.findings.append(
                f"step {answer['step']} layer {answer['layer']}: relative error {error:.2g}, of the log-sum-exp "
                f"{lse_error:.2g}; {TOLERANCE} is allowed"
            )


def _output(answer: Mapping[str, Any]) -> Any:
    return np.frombuffer(base64.b64decode(answer["output"]), np.float32)


def _relative(got: Any, wanted: Any) -> float:
    """The largest relative L2 error of a head; wanted is [heads, v_dim]."""
    difference = np.linalg.norm(got.reshape(wanted.shape) - wanted, axis=-1)
    return float(np.max(difference / np.linalg.norm(wanted, axis=-1)))
