"""What lies on nvme is always the head of a prefix: whatever is stored, read, refused and evicted (CASES 29)."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import Grant, Rig, make_keys, small_settings
from kvtierd.tiers.blocks import OFFLOADING

SHAPE = Geometry(block_size=128, layers=2, kv_heads=4, k_dim=64, v_dim=0)  # 128 KiB a slot: 16 slots in host
SPACE = Namespace(model="model", geometry=SHAPE)
LENGTH = 8
PROMPTS = [make_keys(LENGTH, start=start, namespace=SPACE) for start in range(5)]

prompts = st.integers(0, len(PROMPTS) - 1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("store"), prompts, st.integers(1, LENGTH), st.just(0)),
        st.tuples(st.just("store part"), prompts, st.integers(1, LENGTH - 1), st.integers(1, LENGTH)),
        st.tuples(st.just("read"), prompts, st.integers(1, LENGTH), st.just(0)),
        st.tuples(st.just("read part"), prompts, st.integers(1, LENGTH - 1), st.integers(1, LENGTH)),
        st.tuples(st.just("flush"), st.just(0), st.just(0), st.just(0)),
        st.tuples(st.just("wait"), st.just(0), st.integers(1, 48), st.just(0)),
    ),
    max_size=40,
)
admissions = st.sampled_from(["all", "second-access", "budgeted"])
budgets = st.sampled_from([0, 6, 40])


class Player:
    """One client whose requests may be refused for want of room."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.session = rig.session()
        self.space = 0

    async def play(self, kind: str, prompt: int, first: int, second: int) -> None:
        keys = PROMPTS[prompt]
        if kind == "wait":
            self.rig.clock.advance(first * 3600)
        elif kind == "flush":
            await self.rig.call(self.session, m.Flush(id=1))
        elif kind == "store":
            await self.store(keys[:first], b"")
        elif kind == "store part":
            await self.store(keys[first : first + second], keys[first - 1].tobytes())
        else:
            part = keys[first : first + second] if second else keys[:first]
            await self.read(part, keys[first - 1].tobytes() if second else b"")

    async def store(self, keys: np.ndarray, parent: bytes) -> None:
        request = m.Reserve(id=1, namespace=self.space, parent=parent)
        answer = await self.rig.call(self.session, request, keys.tobytes())
        grant = Grant(answer.reply.reservation, np.frombuffer(answer.frames[0], m.SLOT_DTYPE))
        if grant.id:
            await self.rig.commit(self.session, grant, self.rig.fill(grant, keys, SHAPE))

    async def read(self, keys: np.ndarray, parent: bytes) -> None:
        try:
            reply, _ = await self.rig.acquire(self.session, self.space, keys, parent=parent)
        except RequestError as error:
            if error.code != ErrorCode.BUSY:
                raise
            return
        if reply.lease:
            await self.rig.release(self.session, reply)

    def check_heads(self) -> None:
        """Along each prompt: once a block is not on nvme, none behind it is."""
        table = self.rig.manager.copies.blocks.table
        for keys in PROMPTS:
            rows = self.rig.manager.copies.blocks.pages.lookup(keys, 0)
            there = (rows >= 0) & ((table.flags[rows] & m.TIER_NVME != 0) | (table.marks[rows] & OFFLOADING != 0))
            assert not (there[1:] & ~there[:-1]).any(), there.tolist()


@settings(max_examples=60, deadline=None)
@given(steps, admissions, budgets)
def test_what_is_on_nvme_is_the_head_of_a_prefix(history, admission, budget_blocks):
    base = small_settings()
    budget = max(budget_blocks, 6 if admission == "budgeted" else 0) * SHAPE.slot_bytes
    nvme = msgspec.structs.replace(base.nvme, admission=admission, daily_write_budget=budget)

    async def body():
        async with Rig(msgspec.structs.replace(base, nvme=nvme), MemoryStore()) as rig:
            player = Player(rig)
            player.space = await rig.register(player.session, SPACE)
            for step in history:
                await player.play(*step)
                player.check_heads()
            await rig.call(player.session, m.Flush(id=1))
            player.check_heads()
            rig.check_accounts()

    asyncio.run(body())
