"""Whatever one tenant asks about another's blocks: the same answers, counts and lookups as if nobody had them."""

from __future__ import annotations

import asyncio

import msgspec

from kvtierd.config.schema import Tenant
from kvtierd.core.errors import RequestError
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import Rig, make_keys, small_settings

COUNT = 10
ASKED = make_keys(COUNT)
OPERATIONS = (
    m.Lookup(id=1, namespaces=[1]),
    m.Lookup(id=1, namespaces=[1], prefill_tokens_per_s=1e4),
    m.Acquire(id=1, namespace=1),
    m.Acquire(id=1, namespace=1, verify=True),
    m.Get(id=1, namespace=1),
    m.Prefetch(id=1, namespace=1, tier="host", wait=True),
    m.Pin(id=1, namespace=1),
    m.Unpin(id=1, namespace=1),
    m.Delete(id=1, namespace=1),
    m.OpenSequence(id=1, namespace=1),
    m.Reserve(id=1, namespace=1),
)
"""Reserve last: it makes the keys the asker's own."""


async def asked_beside(others: int) -> list[object]:
    """What tenant b learns about `ASKED`, while tenant a has `COUNT` blocks of a prompt, and what it costs."""
    settings = msgspec.structs.replace(small_settings(), tenants={"a": Tenant(), "b": Tenant()})
    seen: list[object] = []
    async with Rig(settings, MemoryStore(), seed=7) as rig:
        a, b = rig.session(tenant="a"), rig.session(tenant="b")
        assert await rig.store(a, await rig.register(a), make_keys(COUNT, start=others)) == COUNT
        await rig.call(a, m.Flush(id=1))
        assert await rig.register(b) == 1
        for request in OPERATIONS:
            before = rig.manager.stats()
            try:
                answer = await rig.call(b, request, ASKED.tobytes())
                outcome: object = (msgspec.msgpack.encode(answer.reply), [len(frame) for frame in answer.frames])
            except RequestError as error:
                outcome = (error.code, str(error), error.retry_after_ms)
            after = rig.manager.stats()
            counters = {name: after[name] - before[name] for name in rig.manager.copies.counters}
            probed = [after[name] - before[name] for name in ("index_lookups", "index_stash_probes")]
            seen.append((type(request).__name__, outcome, counters, probed))
        rig.check_accounts()
    return seen


def test_case_09_every_operation_costs_the_same_whether_another_tenant_has_the_blocks_or_nobody() -> None:
    theirs, nobodys = asyncio.run(asked_beside(0)), asyncio.run(asked_beside(5))
    assert theirs == nobodys
