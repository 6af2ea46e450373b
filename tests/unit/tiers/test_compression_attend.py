"""Attention over blocks in FP8: the same result wherever they lie, and the reply names them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvtierd.config.schema import Compression
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from tests.unit.tiers.lossy_blocks import PLAIN, LossyRig, settings

LATENT = Geometry(block_size=16, layers=3, kv_heads=1, k_dim=576, v_dim=0, dtype="bf16")
BLOCKS = 5


async def attend(rig: LossyRig, session, sequence: int, layer: int, loss: m.Loss = "any") -> tuple[bytes, list[int]]:
    shape = rig.geometry
    q = np.random.default_rng(3).standard_normal((2, 2 * shape.kv_heads, shape.k_dim)).astype(np.float32)
    v_dim = 0 if shape.v_dim else 512
    request = m.Attend(
        id=1,
        sequence=sequence,
        layers=[layer],
        queries=2,
        heads=2 * shape.kv_heads,
        dtype="fp32",
        v_dim=v_dim,
        loss=loss,
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
                # Where a block was decoded its keys were turned back and rounded to bf16; in FP8 they are not.
                for output in others:
                    error = np.linalg.norm(np.frombuffer(output, np.float32) - wanted) / np.linalg.norm(wanted)
                    assert error < 5e-3
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


class CalmOrNot:
    """Stands in for the guard: the test says whether the host tier thrashes."""

    active = False

    def thrashes(self, _cls: object) -> bool:
        return self.active


async def exact_on_disk_and_fp8_in_host(rig: LossyRig, session, number: int) -> tuple[int, CalmOrNot, bytes]:
    """Blocks whose two copies differ: the sequence over them, what judges the tier, and layer 1's exact answer."""
    keys, guard = rig.keys(BLOCKS), CalmOrNot()
    await rig.store(session, number, keys, PLAIN)
    await rig.call(session, m.Flush(id=1))
    answer = await rig.call(session, m.OpenSequence(id=1, namespace=number), keys.tobytes())
    right, lossy = await attend(rig, session, answer.reply.sequence, 1)
    assert lossy == []
    await rig.call(session, m.CloseSequence(id=1, sequences=[answer.reply.sequence]))
    rig.manager._compressor.settings = Compression(enabled=True, threshold=1000)
    await rig.compressed(BLOCKS)
    rig.manager._attention._pressure = guard
    answer = await rig.call(session, m.OpenSequence(id=1, namespace=number), keys.tobytes())
    return answer.reply.sequence, guard, right


def close(one: bytes, other: bytes) -> bool:
    return np.allclose(np.frombuffer(one, np.float32), np.frombuffer(other, np.float32), rtol=1e-5, atol=1e-6)


def test_a_request_says_whether_fp8_may_stand_in_for_an_exact_copy_and_the_reply_which_blocks_it_did() -> None:
    async def body() -> None:
        async with LossyRig(settings(capacity=8 << 20, enabled=False), MemoryStore()) as rig:
            session, number = await rig.client()
            sequence, guard, right = await exact_on_disk_and_fp8_in_host(rig, session, number)
            everything = list(range(BLOCKS))
            for loss, thrashes, named in (
                ("any", False, everything),
                ("none", False, []),
                ("none", True, []),
                ("pressure", False, []),
                ("pressure", True, everything),
            ):
                guard.active = thrashes
                output, lossy = await attend(rig, session, sequence, 1, loss)
                assert lossy == named, (loss, thrashes)
                assert close(output, right) == (not named), (loss, thrashes)
            rig.check_accounts()

    asyncio.run(body())


def test_an_exact_copy_is_taken_though_a_decoded_one_is_kept_for_the_sequence() -> None:
    async def body() -> None:
        async with LossyRig(settings(capacity=8 << 20, enabled=False), MemoryStore()) as rig:
            session, number = await rig.client()
            _, _, right = await exact_on_disk_and_fp8_in_host(rig, session, number)
            _, codecs = await rig.fetch(session, number, rig.keys(BLOCKS))
            assert any(codecs), "they lie in host decoded"
            answer = await rig.call(session, m.OpenSequence(id=1, namespace=number), rig.keys(BLOCKS).tobytes())
            assert answer.reply.kept == BLOCKS
            output, lossy = await attend(rig, session, answer.reply.sequence, 1, "any")
            assert (lossy, close(output, right)) == (list(range(BLOCKS)), False)
            output, lossy = await attend(rig, session, answer.reply.sequence, 1, "none")
            assert (lossy, close(output, right)) == ([], True)
            rig.check_accounts()

    asyncio.run(body())


def test_where_there_is_no_exact_copy_loss_is_refused_by_name_or_used_and_named() -> None:
    async def body() -> None:
        async with LossyRig(settings(capacity=8 << 20), MemoryStore()) as rig:
            session, number = await rig.client()
            keys = rig.keys(BLOCKS)
            await rig.store(session, number, keys, PLAIN)
            await rig.call(session, m.Flush(id=1))
            assert rig.manager.copies.shapes.forms.count == BLOCKS
            answer = await rig.call(session, m.OpenSequence(id=1, namespace=number), keys.tobytes())
            with pytest.raises(RequestError, match=r"block 0 .* has no exact copy") as caught:
                await attend(rig, session, answer.reply.sequence, 1, "none")
            assert caught.value.code == ErrorCode.NOT_PRESENT
            _, lossy = await attend(rig, session, answer.reply.sequence, 1, "pressure")
            assert lossy == list(range(BLOCKS))
            rig.check_accounts()

    asyncio.run(body())
