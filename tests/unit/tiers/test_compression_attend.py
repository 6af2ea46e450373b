"""Attention over blocks in FP8: the same result wherever they lie, and the reply names them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvtierd.core.geometry import Geometry
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from tests.unit.tiers.lossy_blocks import PLAIN, LossyRig, settings

LATENT = Geometry(block_size=16, layers=3, kv_heads=1, k_dim=576, v_dim=0, dtype="bf16")
BLOCKS = 5


async def attend(rig: LossyRig, session, sequence: int, layer: int) -> tuple[bytes, list[int]]:
    shape = rig.geometry
    q = np.random.default_rng(3).standard_normal((2, 2 * shape.kv_heads, shape.k_dim)).astype(np.float32)
    v_dim = 0 if shape.v_dim else 512
    request = m.Attend(
        id=1, sequence=sequence, layers=[layer], queries=2, heads=2 * shape.kv_heads, dtype="fp32", v_dim=v_dim
    )
    answer = await rig.call(session, request, q.tobytes())
    return bytes(answer.frames[0]), np.frombuffer(answer.frames[-1], "<u4").tolist()


@pytest.mark.parametrize("geometry", [PLAIN, LATENT], ids=["plain", "latent"])
def test_attention_is_the_same_over_compressed_decoded_and_stored_blocks_which_the_reply_names(geometry) -> None:
    store = MemoryStore()

    async def body() -> None:
        async with LossyRig(settings(capacity=8 << 20), store, geometry) as rig:
            session, number = await rig.client()
            keys = rig.keys(BLOCKS)
            await rig.store(session, number, keys, geometry)
            await rig.call(session, m.Flush(id=1))
            forms, copies = rig.manager.copies.shapes.forms, rig.manager.copies
            assert forms.count == BLOCKS
            found = []
            for _ in range(3):
                answer = await rig.call(session, m.OpenSequence(id=1, namespace=number), keys.tobytes())
                assert isinstance(answer.reply, m.SequenceReply)
                sequence = answer.reply.sequence
                found += [(at, *await attend(rig, session, sequence, at)) for at in range(geometry.layers)]
                await rig.call(session, m.CloseSequence(id=1, sequences=[sequence]))
                if forms.count:  # compressed in host; then decoded there; then on nvme alone
                    await rig.fetch(session, number, keys)
                else:
                    await rig.call(session, m.Purge(id=1, namespace=number, tiers=["host"]))
            assert copies.blocks.copies[m.TIER_HOST] == 0
            for layer in range(geometry.layers):
                (first, *others) = [output for at, output, _ in found if at == layer]
                wanted = np.frombuffer(first, np.float32)
                for output in others:
                    np.testing.assert_allclose(np.frombuffer(output, np.float32), wanted, rtol=1e-4, atol=1e-5)
            assert all(lossy == list(range(BLOCKS)) for _, _, lossy in found)
            rig.check_accounts()

    asyncio.run(body())


def test_attention_over_a_damaged_compressed_form_takes_the_copy_on_nvme() -> None:
    store = MemoryStore()

    async def body() -> None:
        async with LossyRig(settings(capacity=8 << 20), store) as rig:
            session, number = await rig.client()
            keys = rig.keys(2)
            await rig.store(session, number, keys, PLAIN)
            await rig.call(session, m.Flush(id=1))
            answer = await rig.call(session, m.OpenSequence(id=1, namespace=number), keys.tobytes())
            assert isinstance(answer.reply, m.SequenceReply)
            right, _ = await attend(rig, session, answer.reply.sequence, 1)
            place = rig.manager.copies.shapes.forms.place_of(int(rig.rows(keys)[0]))
            assert place is not None
            view = rig.manager.copies.host.view(place.cls, place.slot)
            view[view.size // PLAIN.layers + 7] ^= 16
            again, lossy = await attend(rig, session, answer.reply.sequence, 1)
            np.testing.assert_allclose(
                np.frombuffer(again, np.float32), np.frombuffer(right, np.float32), rtol=1e-5, atol=1e-6
            )
            assert lossy == [0, 1]
            assert rig.manager.stats()["host_corrupt_blocks"] == 1
            rig.check_accounts()

    asyncio.run(body())
