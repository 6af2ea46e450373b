"""Bad input, other namespaces and other tenants: refused or a miss, by name, with nothing changed."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvtierd.core.checksum import block_sum
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.protocol import messages as m
from kvtierd.testing.rig import SHAPE, Rig, make_keys, pattern, reply_of

PER_CHUNK = (1 << 20) // SHAPE.slot_bytes


def run(scenario, **options):
    async def body():
        async with Rig(**options) as rig:
            session = rig.session()
            await scenario(rig, session, await rig.register(session))
            rig.check_accounts()

    asyncio.run(body())


async def refused(code, rig, session, request, *frames):
    with pytest.raises(RequestError) as caught:
        await rig.call(session, request, *frames)
    assert caught.value.code == code, caught.value
    return str(caught.value)


async def tick(rig, seconds):
    rig.clock.advance(seconds)
    await asyncio.sleep(0.12)


def shape_fields():
    return {name: getattr(SHAPE, name) for name in SHAPE.__struct_fields__}


def test_case_06_case_07_every_field_of_a_namespace_separates_blocks():
    changes = [
        {"model": "other"}, {"revision": "r2"}, {"tenant_salt": "s"}, {"lora": "a"}, {"lora_version": "2"},
        {"rope_digest": "x"}, {"quantisation": "awq"}, {"tp_rank": 1, "tp_size": 2}, {"tp_size": 2},
        {"pp_rank": 1, "pp_size": 2}, {"group": 1}, {"geometry": Geometry(**{**shape_fields(), "dtype": "fp16"})},
        {"geometry": Geometry(**{**shape_fields(), "layout": "hnd"})},
    ]  # fmt: skip

    async def scenario(rig, session, ns):
        await rig.store(session, ns, make_keys(3))
        for change in changes:
            other = Namespace(**{"model": "test", "geometry": SHAPE, **change})
            number = await rig.register(session, other)
            assert await rig.lookup(session, number, make_keys(3)) == 0, change

    run(scenario)


def test_case_09_another_tenants_block_is_a_miss_in_every_operation():
    async def scenario(rig, session, ns):
        keys = make_keys(3)
        await rig.store(session, ns, keys)
        stranger = rig.session(tenant="other")
        theirs = await rig.register(stranger)
        assert await rig.lookup(stranger, theirs, keys) == 0
        reply, _ = await rig.acquire(stranger, theirs, keys)
        assert reply.count == 0
        deleted = await rig.call(stranger, m.Delete(id=1, namespace=theirs), keys.tobytes())
        assert reply_of(deleted, m.CountReply).count == 0
        await rig.call(stranger, m.Purge(id=1))
        assert await rig.lookup(session, ns, keys) == 3
        grant = await rig.reserve(session, ns, make_keys(1, start=2))
        assert rig.manager.chunk_files(stranger, int(grant.descriptors[0]["chunk"])) is None
        assert rig.manager.chunk_files(session, int(grant.descriptors[0]["chunk"])) is not None

    run(scenario)


def test_bad_input_is_refused_by_name_and_changes_nothing():
    async def scenario(rig, session, ns):
        keys = make_keys(3)
        grant = await rig.reserve(session, ns, keys)
        sums = rig.fill(grant, keys)
        totals = np.array([block_sum(row) for row in sums], np.uint64)
        commit = m.Commit(id=1, reservation=grant.id)
        bad = ErrorCode.BAD_ARGUMENT
        assert "31 bytes" in await refused(bad, rig, session, m.Lookup(id=1, namespaces=[ns]), bytes(31))
        big = bytes(32 * (m.MAX_BATCH + 1))
        await refused(ErrorCode.BATCH_TOO_LARGE, rig, session, m.Lookup(id=1, namespaces=[ns]), big)
        await refused(ErrorCode.BAD_FRAMES, rig, session, m.Lookup(id=1, namespaces=[ns]))
        await refused(ErrorCode.UNKNOWN_NAMESPACE, rig, session, m.Lookup(id=1, namespaces=[99]), bytes(32))
        await refused(bad, rig, session, commit, sums.tobytes()[:-8], totals.tobytes())
        wrong = totals.copy()
        wrong[2] ^= np.uint64(1)
        text = await refused(ErrorCode.CHECKSUM_MISMATCH, rig, session, commit, sums.tobytes(), wrong.tobytes())
        assert "block 2" in text
        elsewhere = m.Commit(id=1, reservation=grant.id, index=[0, 7])
        assert "block 7" in await refused(bad, rig, session, elsewhere, sums[:2].tobytes(), totals[:2].tobytes())
        twice = m.Commit(id=1, reservation=grant.id, index=[1, 1])
        await refused(bad, rig, session, twice, sums[:2].tobytes(), totals[:2].tobytes())
        thief = rig.session()
        await refused(ErrorCode.NOT_YOURS, rig, thief, commit, sums.tobytes(), totals.tobytes())
        await refused(ErrorCode.NOT_YOURS, rig, thief, m.Abort(id=1, reservation=grant.id))
        await refused(ErrorCode.NOT_YOURS, rig, thief, m.Release(id=1, leases=[1]))
        off = m.RegisterNamespace(id=1, namespace=Namespace(model="x", geometry=SHAPE), block_bytes=5)
        assert "not 5" in await refused(ErrorCode.GEOMETRY_MISMATCH, rig, session, off)
        huge = Geometry(block_size=4096, layers=8, kv_heads=8, k_dim=128, v_dim=128)
        too_large = m.RegisterNamespace(id=1, namespace=Namespace(model="x", geometry=huge))
        await refused(ErrorCode.TOO_LARGE, rig, session, too_large)
        framed = [keys.tobytes(), totals.tobytes(), b"x", b"y", b"z"]
        await refused(ErrorCode.GEOMETRY_MISMATCH, rig, session, m.Put(id=1, namespace=ns), *framed)
        assert await rig.lookup(session, ns, keys) == 0
        assert (await rig.commit(session, grant, sums)).committed == 3
        await refused(ErrorCode.NOT_YOURS, rig, session, commit, sums.tobytes(), totals.tobytes())

    run(scenario)


def test_put_with_a_wrong_sum_stores_none_of_its_blocks():
    async def scenario(rig, session, ns):
        keys = make_keys(2)
        blocks = [pattern(key, SHAPE).tobytes() for key in keys]
        request = m.Put(id=1, namespace=ns)
        await refused(ErrorCode.CHECKSUM_MISMATCH, rig, session, request, keys.tobytes(), bytes(16), *blocks)
        assert await rig.lookup(session, ns, keys) == 0
        assert not rig.manager.copies.host.pool.holds.any()

    run(scenario)
