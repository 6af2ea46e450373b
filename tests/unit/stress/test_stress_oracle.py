"""The oracle of the stress: right against the plain formula, and blind to no planted fault."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import rotation
from kvtierd.gpu.reference.attention import reference_attention
from kvtierd.stress.content import BlockId, Content
from kvtierd.stress.decode import Context, contexts, judge
from kvtierd.stress.oracle import Asked, Oracle, queries, turned

SHAPE = Geometry(block_size=64, layers=2, kv_heads=2, k_dim=64, v_dim=32)
HEADS, BLOCKS, LAYER = 8, 12, 1
TOKENS = BLOCKS * SHAPE.block_size
NAMES = [BlockId(0, number) for number in range(BLOCKS)]


def wide(words: np.ndarray) -> np.ndarray:
    return (words.astype(np.uint32) << 16).view(np.float32)


def kv_of(content: Content, *, lossy: bool = False) -> list[tuple[np.ndarray, np.ndarray, int]]:
    found = []
    for number, name in enumerate(NAMES):
        if lossy:  # what the codes stand for, turned back without rounding it
            k, v = content.encoded(name, LAYER)
            found.append((turned(wide(k), rotation(SHAPE)), wide(v), number * SHAPE.block_size))
        else:
            k, v = content.layer(name, LAYER, lossy=False)
            found.append((wide(k), wide(v), number * SHAPE.block_size))
    return found


def formula(q: np.ndarray, blocks: list[Any], length: int) -> tuple[np.ndarray, np.ndarray]:
    output, lse = reference_attention(q[None], blocks, scale=SHAPE.k_dim**-0.5, v_dim=SHAPE.v_dim, position=length - 1)
    return output[0], lse[0]


def asked_at(content: Content, step: int, length: int, lossy: bool = False) -> Asked:
    return Asked(queries(content, NAMES, LAYER, step, HEADS)[0], length, np.full(BLOCKS, lossy))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("lossy", [False, True])
def test_it_computes_the_formula_for_steps_of_several_lengths(threads: int, lossy: bool) -> None:
    content = Content(1, SHAPE)
    steps = [asked_at(content, step, TOKENS - step * 97, lossy) for step in range(3)]
    output, lse = Oracle(content, HEADS, threads).attend(LAYER, NAMES, steps)
    for number, step in enumerate(steps):
        wanted, wanted_lse = formula(step.q, kv_of(content, lossy=lossy), step.length)
        assert np.allclose(output[number], wanted, rtol=1e-11, atol=1e-13)
        assert np.allclose(lse[number], wanted_lse, rtol=1e-12)


def test_steps_whose_blocks_were_lossy_in_other_places_are_computed_apart() -> None:
    content = Content(1, SHAPE)
    steps = [asked_at(content, 0, TOKENS), asked_at(content, 0, TOKENS, lossy=True)]
    output, _ = Oracle(content, HEADS, 2).attend(LAYER, NAMES, steps)
    assert np.allclose(output[1], formula(steps[1].q, kv_of(content, lossy=True), TOKENS)[0], rtol=1e-11, atol=1e-13)
    assert not np.allclose(output[0], output[1], rtol=1e-4)


def test_heads_that_aim_at_a_token_find_it() -> None:
    content = Content(5, SHAPE)
    q, aims = queries(content, NAMES, LAYER, 0, HEADS)
    whole = formula(q, kv_of(content), TOKENS)[0]
    for number, aim in enumerate(aims):
        blocks = kv_of(content)
        blocks[aim] = (blocks[aim][0], blocks[aim][1] * 0, blocks[aim][2])
        without = formula(q, blocks, TOKENS)[0]
        head = 2 * number
        assert np.linalg.norm(without[head] - whole[head]) > 0.5 * np.linalg.norm(whole[head])


def answers_from(content: Content, blocks: list[Any]) -> list[dict[str, Any]]:
    """What a daemon would answer whose blocks are these."""
    found = []
    for step in range(2):
        q, length = queries(content, NAMES, LAYER, step, HEADS)[0], TOKENS - 1 + step
        output, lse = formula(q, blocks, length)
        found.append({
            "step": step, "layer": LAYER, "length": length, "lossy": [],
            "output": base64.b64encode(output.astype(np.float32).tobytes()).decode(),
            "lse": base64.b64encode(lse.astype(np.float32).tobytes()).decode(),
        })  # fmt: skip
    return found


def test_right_answers_pass() -> None:
    content = Content(6, SHAPE)
    judged = judge(content, HEADS, Context(0, 1), BLOCKS, answers_from(content, kv_of(content)), 2)
    assert (judged.checked, judged.wrong, judged.findings) == (2, 0, [])
    assert judged.error < 1e-6


def flipped_bit(blocks: list[Any]) -> None:
    # The highest bit of an exponent that is not that of a huge number already, in a value.
    blocks[3][1][5, 0, 7] *= np.float32(2.0**8)


def swapped_block(blocks: list[Any]) -> None:
    # At their own places: the last one is partly out of sight of the first step.
    (k, v, first), (k_last, v_last, last) = blocks[4], blocks[-1]
    blocks[4], blocks[-1] = (k_last, v_last, first), (k, v, last)


def swapped_values(blocks: list[Any]) -> None:
    blocks[2], blocks[7] = (blocks[2][0], blocks[7][1], blocks[2][2]), (blocks[7][0], blocks[2][1], blocks[7][2])


def dropped_layer(blocks: list[Any]) -> None:
    blocks[6] = (blocks[6][0] * 0, blocks[6][1] * 0, blocks[6][2])


def dropped_block(blocks: list[Any]) -> None:
    del blocks[6]


def stale_scale(blocks: list[Any]) -> None:
    blocks[1][1][:, 1] *= 2


@pytest.mark.parametrize(
    "plant", [flipped_bit, swapped_block, swapped_values, dropped_layer, dropped_block, stale_scale]
)
def test_planted_fault_is_found(plant: Any) -> None:
    content = Content(6, SHAPE)
    blocks = kv_of(content)
    plant(blocks)
    judged = judge(content, HEADS, Context(0, 1), BLOCKS, answers_from(content, blocks), 2)
    assert judged.wrong >= 1
    assert judged.findings


def test_shorter_contexts_are_the_whole_one_once_more() -> None:
    whole, *shorter = contexts(3, BLOCKS)
    assert whole.names(BLOCKS) == NAMES
    assert len(shorter) == 3
    together = [name for context in shorter for name in context.names(BLOCKS)]
    assert sorted(together, key=lambda name: name.index) == NAMES
    assert contexts(BLOCKS, BLOCKS) == [Context(0, 1)], "contexts of one block say nothing about growth"


def test_answers_that_are_no_numbers_are_wrong() -> None:
    content = Content(6, SHAPE)
    answers = answers_from(content, kv_of(content))
    nothing = np.full((HEADS, SHAPE.v_dim), np.nan, np.float32)
    answers[1]["output"] = base64.b64encode(nothing.tobytes()).decode()
    assert judge(content, HEADS, Context(0, 1), BLOCKS, answers, 1).wrong == 1


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        Oracle(Content(1, SHAPE), 7, 1)
