"""A sequence that is closed between a request for attention and its beginning gives back what it held once only."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.protocol import messages as m
from tests.unit.tiers.attending import BLOCKS, SHAPE, queries, run


def asked(made, sequence):
    """A request for attention as the server has it before its task runs."""
    q = np.ascontiguousarray(queries(count=1), np.float32)
    request = m.Attend(id=1, sequence=sequence, layers=[0], queries=1, heads=q.shape[1], dtype="fp32")
    return made.rig.manager.handle(made.session, request, [memoryview(q.tobytes())])


@pytest.mark.parametrize("tier", ["host", "gpu", "nvme"])
def test_case_05_case_18_attention_over_a_sequence_that_was_closed_meanwhile_is_refused(tier):
    async def scenario(made):
        await made.place([tier] * BLOCKS)
        first, other = await made.open(), await made.open()
        held = {name: int(pool.holds.sum()) for name, pool in pools(made)}
        waiting = asked(made, first)
        await made.rig.call(made.session, m.CloseSequence(id=1, sequences=[first]))
        with pytest.raises(RequestError) as caught:
            await waiting
        assert caught.value.code == ErrorCode.NOT_YOURS
        for name, pool in pools(made):
            assert int(pool.holds.sum()) == held[name] // 2, "the other sequence's holds were taken too"
        assert (await made.attend(other, queries(count=1)))[2].id is not None

    run(scenario)


def pools(made):
    copies = made.rig.manager.copies
    return [("host", copies.host.pool), ("gpu", copies.gpu.pool)]


def test_attention_that_has_begun_is_finished_though_its_sequence_is_closed():
    async def scenario(made):
        await made.place(["nvme"] * BLOCKS)
        sequence = await made.open()
        task = asyncio.create_task(made.attend(sequence, queries(count=1)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await made.rig.call(made.session, m.CloseSequence(id=1, sequences=[sequence]))
        output, _, _ = await task
        assert output.shape[-1] == SHAPE.v_dim

    run(scenario)
