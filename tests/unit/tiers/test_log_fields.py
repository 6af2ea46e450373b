"""Lines about a block carry its namespace, key and tier, so that a journal can be searched by them."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import Rig, make_keys


def test_failed_write_names_namespace_key_and_tier(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        store = MemoryStore()
        store.fail_writes = 1
        async with Rig(store=store) as rig:
            session = rig.session()
            ns = await rig.register(session)
            await rig.store(session, ns, make_keys(2))
            await rig.call(session, m.Flush(id=1))
            model = rig.manager.copies.namespaces.entries[0].namespace.model
            key = make_keys(2)[0].tobytes().hex()
            (fields,) = {tuple(record.fields.items()) for record in caplog.records if hasattr(record, "fields")}
            assert dict(fields) == {"tier": "nvme", "namespace": model, "block_key": key}

    logger = logging.getLogger("kvtierd.tiers.write_behind")
    logger.addHandler(caplog.handler)
    try:
        asyncio.run(scenario())
    finally:
        logger.removeHandler(caplog.handler)
