"""Requests about no blocks at all are answered as such, also by a client that has asked about some before."""

from __future__ import annotations

import asyncio

import pytest

from kvtierd.protocol import messages as m
from kvtierd.testing.rig import Rig, make_keys


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("kind", [m.Put, m.Reserve, m.Get, m.Acquire, m.Prefetch, m.Pin, m.Delete])
def test_a_request_about_no_blocks_is_answered(kind, before):
    async def body():
        async with Rig() as rig:
            session = rig.session()
            ns = await rig.register(session)
            if before:
                assert await rig.store(session, ns, make_keys(before)) == before
            frames = [b"", b""] if kind is m.Put else [b""]
            await rig.call(session, kind(id=1, namespace=ns), *frames)
            assert await rig.lookup(session, ns, make_keys(3)) == before
            rig.check_accounts()

    asyncio.run(body())
