"""Sequences: opened over whole blocks only, kept within a share, ended by time, by request and with their client."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.protocol import messages as m
from kvtierd.testing.attention import random_kv
from kvtierd.testing.rig import make_keys, reply_of
from tests.unit.tiers.attending import BLOCKS, SHAPE, attending, check, queries, run


async def refused(awaitable):
    with pytest.raises(RequestError) as caught:
        await awaitable
    return caught.value


async def extend(made, sequence, names):
    answer = await made.rig.call(made.session, m.Extend(id=1, sequence=sequence), names.tobytes())
    return reply_of(answer, m.CountReply).count


async def close(made, *sequences):
    await made.rig.call(made.session, m.CloseSequence(id=1, sequences=list(sequences)))


def test_a_sequence_grows_by_blocks_that_are_stored_later():
    async def scenario(made):
        kv = random_kv(SHAPE, 9, seed=3)
        other = await attending(made.rig, kv)
        sequence = await other.open(4)
        assert await extend(other, sequence, kv.names[4:6]) == 6
        assert await extend(other, sequence, kv.names[6:]) == 9
        await check(other, sequence, queries(), 1)
        made.rig.manager.session_detached(other.session)

    run(scenario)


def test_a_key_that_is_not_present_is_named():
    async def scenario(made):
        names = made.kv.names.copy()
        names[3] = 7
        error = await refused(made.rig.call(made.session, m.OpenSequence(id=1, namespace=made.number), names.tobytes()))
        assert error.code == ErrorCode.NOT_PRESENT
        assert "block 3 (0707070707070707)" in str(error)
        sequence = await made.open(2)
        error = await refused(extend(made, sequence, names[2:]))
        assert error.code == ErrorCode.NOT_PRESENT
        assert "block 3 (0707070707070707)" in str(error)
        assert await extend(made, sequence, names[2:3]) == 3

    run(scenario)


def test_a_block_that_is_not_whole_yet_is_not_present():
    async def scenario(made):
        names = make_keys(1, start=77, namespace=made.kv.namespace)
        grant = await made.rig.reserve(made.session, made.number, names)
        error = await refused(made.rig.call(made.session, m.OpenSequence(id=1, namespace=made.number), names.tobytes()))
        assert error.code == ErrorCode.NOT_PRESENT
        await made.rig.call(made.session, m.Abort(id=1, reservation=grant.id))

    run(scenario)


def test_blocks_of_another_namespace_are_not_present_and_namespaces_must_be_registered():
    async def scenario(made):
        other = await made.rig.register(made.session, Namespace(model="another", geometry=SHAPE))
        for number, code in ((other, ErrorCode.NOT_PRESENT), (99, ErrorCode.UNKNOWN_NAMESPACE)):
            request = m.OpenSequence(id=1, namespace=number)
            error = await refused(made.rig.call(made.session, request, made.kv.names.tobytes()))
            assert error.code == code

    run(scenario)


def test_a_key_is_in_a_sequence_once():
    async def scenario(made):
        twice = np.concatenate([made.kv.names[:2], made.kv.names[1:2]])
        error = await refused(made.rig.call(made.session, m.OpenSequence(id=1, namespace=made.number), twice.tobytes()))
        assert error.code == ErrorCode.BAD_ARGUMENT
        error = await refused(extend(made, await made.open(3), made.kv.names[2:]))
        assert error.code == ErrorCode.BAD_ARGUMENT

    run(scenario)


@pytest.mark.parametrize(
    "fields", [{"layout": "opaque:mine"}, {"dtype": "fp8_e5m2"}, {"dtype": "int8"}], ids=["opaque", "e5m2", "int8"]
)
def test_blocks_that_nobody_computes_on_cannot_be_opened(fields):
    async def scenario(made):
        space = Namespace(
            model="odd", geometry=Geometry(block_size=16, layers=1, kv_heads=1, k_dim=64, v_dim=64, **fields)
        )
        number = await made.rig.register(made.session, space)
        names = make_keys(1, namespace=space)
        assert await made.rig.store(made.session, number, names, space.geometry) == 1
        error = await refused(made.rig.call(made.session, m.OpenSequence(id=1, namespace=number), names.tobytes()))
        assert error.code == ErrorCode.BAD_ARGUMENT
        assert str(next(iter(fields.values()))) in str(error)

    run(scenario)


def test_sequences_of_others_and_closed_ones_are_not_yours():
    async def scenario(made):
        sequence, stranger = await made.open(), made.rig.session()
        for session, number in ((stranger, sequence), (made.session, sequence + 1)):
            error = await refused(made.rig.call(session, m.CloseSequence(id=1, sequences=[number])))
            assert error.code == ErrorCode.NOT_YOURS
        await close(made, sequence)
        error = await refused(made.attend(sequence, queries()))
        assert error.code == ErrorCode.NOT_YOURS
        assert str(sequence) in str(error)

    run(scenario)


def test_a_sequence_ends_when_nothing_is_asked_of_it_and_not_before():
    async def scenario(made):
        reply = await made.opened(ttl_ms=1000)
        assert reply.ttl_ms == 1000
        manager, clock = made.rig.manager, made.rig.clock
        for _ in range(3):
            clock.advance(0.8)
            manager._sequences.expire(clock.now_ns())
            await check(made, reply.sequence, queries())
        clock.advance(1.1)
        manager._sequences.expire(clock.now_ns())
        manager._sequences.expire(clock.now_ns() + 2_000_000_000)
        assert manager.stats()["sequences"] == 0
        assert manager.copies.counters["expired_sequences"] == 1
        error = await refused(made.attend(reply.sequence, queries()))
        assert error.code == ErrorCode.NOT_YOURS

    run(scenario)


def test_a_sequence_that_is_closed_while_it_is_attended_to_goes_on_until_the_answer():
    async def scenario(made):
        await made.place(["host", "nvme"] * 3 + ["gpu"])
        sequence = await made.open()
        task = asyncio.create_task(check(made, sequence, queries()))
        await asyncio.sleep(0)
        await close(made, sequence)
        assert made.rig.manager.stats()["sequences"] == 0
        await task

    run(scenario)


def test_what_a_sequence_keeps_is_bounded_by_a_share_and_the_rest_is_found_where_it_is():
    share = 3.5 * SHAPE.slot_bytes / (2 << 20)

    async def scenario(made):
        reply = await made.opened()
        assert reply.kept == 3
        assert made.rig.manager.stats()["sequence_host_kept_bytes"] == 3 * SHAPE.slot_bytes
        assert (await made.opened()).kept == 0
        assert (await check(made, reply.sequence, queries())).host_parts == BLOCKS
        await close(made, reply.sequence)
        assert made.rig.manager.stats()["sequence_host_kept_bytes"] == 0
        assert (await made.opened()).kept == 3

    run(scenario, attention={"kept_share": share})


def test_copies_that_come_later_are_used_and_kept():
    async def scenario(made):
        await made.place(["nvme"] * BLOCKS)
        reply = await made.opened()
        assert reply.kept == 0
        assert (await check(made, reply.sequence, queries())).nvme_parts == BLOCKS
        await made.rig.call(made.session, m.Prefetch(id=1, namespace=made.number, wait=True), made.kv.names.tobytes())
        assert (await check(made, reply.sequence, queries())).host_parts == BLOCKS
        assert made.rig.manager.stats()["sequence_host_kept_bytes"] == BLOCKS * SHAPE.slot_bytes

    run(scenario)


def test_there_are_no_more_sequences_than_the_limit_and_a_client_gets_a_quarter():
    async def scenario(made):
        for _ in range(2):
            await made.open()
        error = await refused(made.open())
        assert error.code == ErrorCode.BUSY
        assert error.retry_after_ms > 0

    run(scenario, attention={"max_sequences": 8})


def test_deleted_blocks_go_on_in_a_sequence_that_keeps_them():
    async def scenario(made):
        sequence = await made.open()
        await made.rig.call(made.session, m.Delete(id=1, namespace=made.number), made.kv.names.tobytes())
        await check(made, sequence, queries())
        error = await refused(made.open())
        assert error.code == ErrorCode.NOT_PRESENT

    run(scenario)


def test_an_empty_sequence_can_be_extended_and_not_attended_to():
    async def scenario(made):
        sequence = await made.open(0)
        error = await refused(made.attend(sequence, queries()))
        assert error.code == ErrorCode.BAD_ARGUMENT
        await extend(made, sequence, made.kv.names)
        await check(made, sequence, queries())

    run(scenario)


def test_what_is_remembered_of_sequences_is_bounded_for_each_client(monkeypatch):
    monkeypatch.setattr("kvtierd.tiers.sequences.METADATA_MAX_BYTES", 4 * 10 * (8 * SHAPE.layers + 24))

    async def scenario(made):
        first = await made.open()
        error = await refused(made.open())
        assert error.code == ErrorCode.BUSY
        assert "7 more blocks" in str(error)
        assert (await made.opened(3)).blocks == 3
        other = await attending(made.rig, random_kv(SHAPE, 5, seed=6, model="other"))
        await other.open()
        made.rig.manager.session_detached(other.session)
        await close(made, first)
        await check(made, await made.open(), queries())

    run(scenario)
