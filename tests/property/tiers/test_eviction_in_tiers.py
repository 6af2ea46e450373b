"""What the eviction policy does in the real tiers, under random prompts that fork, leases, pins and tight pools."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtierd.config.schema import KvCache
from kvtierd.core.keys import block_keys
from kvtierd.protocol import messages as m
from kvtierd.testing.rig import SHAPE, Rig, small_settings

TOKENS = SHAPE.block_size
PROMPT = st.lists(st.integers(0, 2), min_size=1, max_size=40)
STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "pieces", "lease", "release", "wait", "pin", "look"]), PROMPT),
    min_size=5,
    max_size=60,
)


def keys_for(path):
    tokens = np.repeat(np.array(path, np.uint32), TOKENS)
    return block_keys(bytes(32), tokens, TOKENS)


class Tight:
    """A rig whose host tier has 85 slots, and what a client of it knows."""

    def __init__(self, eviction):
        base = small_settings(capacity=1 << 20, watermark=1.0)
        self.rig = Rig(_with(base, eviction))
        self.stored: set[tuple[int, ...]] = set()
        self.leases: list[tuple[m.AcquireReply, np.ndarray]] = []
        self.pinned: set[tuple[int, ...]] = set()

    async def run(self, steps):
        async with self.rig as rig:
            self.session = rig.session()
            self.number = await rig.register(self.session)
            for what, path in steps:
                await getattr(self, what)(path)
                rig.check_accounts()
                await self.check()

    async def store(self, path):
        await self._store(path, 0, b"")

    async def pieces(self, path):
        """As a client does whose prefix is longer than a batch: each piece names the block before it."""
        for begin in range(0, len(path), 7):
            parent = keys_for(path)[begin - 1].tobytes() if begin else b""
            if not await self._store(path[: begin + 7], begin, parent):
                break

    async def _store(self, path, begin, parent):
        keys = keys_for(path)[begin:]
        request = m.Reserve(id=1, namespace=self.number, parent=parent)
        answer = await self.rig.call(self.session, request, keys.tobytes())
        descriptors = np.frombuffer(answer.frames[0], m.SLOT_DTYPE)
        if answer.reply.reservation:
            grant = _grant(answer)
            await self.rig.commit(self.session, grant, self.rig.fill(grant, keys))
        self.stored |= {tuple(path[: begin + i + 1]) for i in range(len(keys))}
        return not (descriptors["status"] == m.SLOT_BUSY).any()

    async def lease(self, path):
        if len(self.leases) < 4:
            reply, descriptors = await self.rig.acquire(self.session, self.number, keys_for(path), ttl_ms=600_000)
            if reply.count:
                self.leases.append((reply, descriptors))

    async def release(self, path):
        if self.leases:
            reply, _ = self.leases.pop(len(path) % len(self.leases))
            await self.rig.release(self.session, reply)

    async def wait(self, path):
        self.rig.clock.advance(0.1 * len(path) ** 2)

    async def pin(self, path):
        if len(self.pinned) < 20 and len(path) < 5:
            keys = keys_for(path)
            reply = (await self.rig.call(self.session, m.Pin(id=1, namespace=self.number), keys.tobytes())).reply
            self.pinned |= {tuple(path[: i + 1]) for i in range(reply.count)} if reply.count == len(path) else set()

    async def look(self, path):
        await self.rig.lookup(self.session, self.number, keys_for(path))

    async def check(self):
        blocks = self.rig.manager.copies.blocks
        present = {path for path in self.stored if blocks.find(keys_for(path)[-1:], 0).size}
        holes = {path for path in present if len(path) > 1 and path[:-1] not in present}
        assert not holes, f"blocks are kept behind a hole: {sorted(holes)[:3]}"
        assert self.pinned <= present, "a pinned block was evicted"
        for _, descriptors in self.leases:
            for descriptor in descriptors:
                assert self.rig.generation(descriptor) == int(descriptor["generation"]), "a leased slot changed hands"


def _with(base, eviction):
    cache = KvCache(eviction=eviction)
    return type(base)(**{name: getattr(base, name) for name in base.__struct_fields__} | {"kv_cache_config": cache})


def _grant(answer):
    from kvtierd.testing.rig import Grant

    return Grant(answer.reply.reservation, np.frombuffer(answer.frames[0], m.SLOT_DTYPE))


@settings(max_examples=30, deadline=None)
@given(steps=STEPS)
@pytest.mark.parametrize("eviction", ["returns", "lru"])
def test_no_held_block_goes_and_no_hole_comes_before_a_kept_tail(eviction, steps):
    asyncio.run(Tight(eviction).run(steps))
