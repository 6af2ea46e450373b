"""Two managers get the same requests, one of them without the quick ways: whatever can be seen of them is the same."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtierd.core.checksum import block_sum
from kvtierd.core.errors import RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.core.stored_form import Codec
from kvtierd.policy import leaf_lists
from kvtierd.policy.return_eviction import ReturnEviction
from kvtierd.protocol import messages as m
from kvtierd.protocol.service import Answer, Session
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import SHAPE, Rig, make_keys, small_settings

PROMPTS, BLOCKS_MAX = 6, 70
"""More than the 170 slots of the host tier hold."""

CLASSES = 4
"""Classes of slots that are compared; there is one."""

spans = st.tuples(st.integers(0, PROMPTS - 1), st.integers(0, 8), st.integers(1, BLOCKS_MAX))
steps = st.one_of(
    st.tuples(st.just("store"), spans, st.integers(0, 3)),
    st.tuples(st.just("store"), spans, st.just(0)),
    st.tuples(st.just("read"), spans, st.booleans()),
    st.tuples(st.just("lookup"), spans, st.booleans()),
    st.tuples(st.just("verify"), spans, st.booleans()),
    st.tuples(st.just("prefetch"), spans, st.booleans()),
    st.tuples(st.just("delete"), spans, st.booleans()),
    st.tuples(st.just("abort"), spans, st.booleans()),
    st.tuples(st.just("release"), st.integers(0, 100), st.booleans()),
    st.tuples(st.just("sleep"), st.sampled_from([0.001, 0.4, 2.0, 70.0]), st.booleans()),
    st.tuples(st.just("tick"), st.none(), st.booleans()),
    st.tuples(st.just("twice"), spans, st.booleans()),
)


@dataclasses.dataclass
class Side:
    """One manager and its client; `heard` has all that was answered."""

    rig: Rig
    session: Session
    namespace: int
    leases: list[int]
    heard: list[tuple[Any, list[bytes]]]

    async def call(self, request: m.AnyRequest, *frames: bytes) -> Answer | None:
        """Send a request and note its answer, or that it was refused."""
        try:
            answer = await self.rig.call(self.session, request, *frames)
        except RequestError as error:
            self.heard.append(((error.code, str(error)), []))
            return None
        self.heard.append((answer.reply, [bytes(frame) for frame in answer.frames]))
        return answer

    async def store(self, keys: bytes, parent: bytes, leave: int) -> None:
        """Reserve, and commit all but `leave` of the blocks granted."""
        answer = await self.call(m.Reserve(id=1, namespace=self.namespace, parent=parent), keys)
        if answer is None or not isinstance(answer.reply, m.ReserveReply) or not answer.reply.granted:
            return
        granted = np.flatnonzero(np.frombuffer(answer.frames[0], m.SLOT_DTYPE)["status"] == m.SLOT_GRANTED)
        which = granted[: granted.size - leave]
        sums = np.arange(which.size * SHAPE.layers, dtype=np.uint64).reshape(-1, SHAPE.layers)
        totals = np.array([block_sum(row) for row in sums], np.uint64)
        index = None if not leave else which.tolist()
        await self.call(
            m.Commit(id=1, reservation=answer.reply.reservation, index=index), sums.tobytes(), totals.tobytes()
        )

    async def read(self, keys: bytes, parent: bytes) -> None:
        """Acquire, and keep the lease."""
        answer = await self.call(m.Acquire(id=1, namespace=self.namespace, parent=parent), keys)
        if answer is not None and isinstance(answer.reply, m.AcquireReply) and answer.reply.lease:
            self.leases.append(answer.reply.lease)

    async def take(self, step: tuple[Any, Any, Any]) -> None:
        """Do one step."""
        name, what, option = step
        if name == "sleep":
            self.rig.clock.advance(what)
        elif name == "tick":
            self.rig.manager.tick()
            await self.rig.settled()
        elif name == "release":
            if self.leases:
                lease = self.leases.pop(what % len(self.leases))
                await self.call(m.Release(id=1, leases=[lease]))
        else:
            await self.ask(name, what, option)

    async def ask(self, name: str, span: tuple[int, int, int], option: Any) -> None:
        """Do one step that names blocks."""
        prompt, begin, count = span
        prefix = make_keys(begin + count, start=prompt)
        keys, parent = prefix[begin:], prefix[begin - 1].tobytes() if begin else b""
        frame, namespace = keys.tobytes(), self.namespace
        if name == "store":
            await self.store(frame, parent, option)
        elif name == "twice":
            await self.store(np.concatenate([keys, keys[:2]]).tobytes(), parent, 0)
        elif name == "read":
            await self.read(frame, parent)
        elif name == "lookup":
            await self.call(m.Lookup(id=1, namespaces=[namespace], prefill_tokens_per_s=0), frame)
        elif name == "verify":
            await self.call(m.Acquire(id=1, namespace=namespace, verify=True), frame)
        elif name == "prefetch":
            await self.call(m.Prefetch(id=1, namespace=namespace, wait=True), frame)
        elif name == "delete":
            await self.call(m.Delete(id=1, namespace=namespace), frame)
        else:
            answer = await self.call(m.Reserve(id=1, namespace=namespace), frame)
            if answer is not None and isinstance(answer.reply, m.ReserveReply) and answer.reply.granted:
                await self.call(m.Abort(id=1, reservation=answer.reply.reservation))

    def seen(self) -> dict[str, Any]:
        """What the manager keeps, as far as a secret hash has no part in it."""
        manager = self.rig.manager
        copies, policy = manager.copies, manager.copies.host.policy
        assert isinstance(policy, ReturnEviction)
        policy.take_back()  # each way does so in its own time, before it next looks at the lists
        used, slots = copies.blocks.table.used_rows, copies.host.pool.slots_max
        leaves, ends, marks, cursors = policy.columns
        lists = CLASSES * leaf_lists.LISTS
        return {
            "records": _digest(copies.blocks.table.records[:used]),
            "sums": _digest(copies.blocks.table.block_sum[:used]),
            "rows of slots": _digest(copies.host.pool.row[:slots]),
            "holds": _digest(copies.host.pool.holds[:slots]),
            "generations": _digest(copies.host.generation[:slots]),
            "leaves": [
                _digest(column) for column in (leaves[:slots], ends[:, :lists], marks[:CLASSES], cursors[:CLASSES])
            ],
            "model": [_digest(column) for column in policy.model.columns[:6]],
            "times of leaving": _digest(copies.absences.left_ms[:used]),
            "statistics": {name: value for name, value in manager.stats().items() if not _is_its_own(name)},
        }


def _is_its_own(name: str) -> bool:
    """Statistics of a table whose hash is secret, and of speeds."""
    return name.startswith("index_") or name.endswith("_bytes_per_s")


def _digest(column: Any) -> str:
    return hashlib.blake2b(np.ascontiguousarray(column).view(np.uint8).data, digest_size=8).hexdigest()


LOSSY = Geometry(block_size=16, layers=3, kv_heads=2, k_dim=96, v_dim=64)


async def _fp8_beside(rig: Rig) -> int:
    """Another namespace gets two blocks that have been through FP8 in host; its number in the daemon."""
    session, space = rig.session(), Namespace(model="lossy", geometry=LOSSY)
    number, keys = await rig.register(session, space, allow_loss=True), make_keys(2, namespace=space)
    await rig.store(session, number, keys, LOSSY)
    copies = rig.manager.copies
    entry = next(entry for entry in copies.namespaces.entries if entry.namespace == space)
    rows = copies.blocks.find(keys, entry.number)
    some, forms = np.ones(rows.size, np.uint64), copies.shapes.forms
    forms.stored(rows, np.full(rows.size, Codec.FP8_E4M3, np.uint8), some)
    forms.arrived(rows, np.ones(rows.size, np.bool_), some)
    assert forms.codecs_of(rows) == bytes([Codec.FP8_E4M3]) * 2
    return entry.number


async def _side(quick: bool, with_disk: bool, beside_fp8: bool = False) -> Side:
    rig = Rig(small_settings(), MemoryStore() if with_disk else None, seed=7)
    if not quick:
        rig.manager.quick.turn_off()
    await rig.manager.start(ticking=False)
    await rig.settled()
    if beside_fp8:
        await _fp8_beside(rig)
    session = rig.session()
    return Side(rig, session, await rig.register(session, Namespace(model="test", geometry=SHAPE)), [], [])


async def _compare(todo: list[tuple[Any, Any, Any]], with_disk: bool, beside_fp8: bool = False) -> None:
    sides = [await _side(quick, with_disk, beside_fp8) for quick in (True, False)]
    try:
        for step in todo:
            for side in sides:
                await side.take(step)
            quick, slow = sides
            assert quick.heard == slow.heard, f"answers to {step} differ"
            if not with_disk:
                mine, other = quick.seen(), slow.seen()
                for name, value in mine.items():
                    assert value == other[name], f"{name} differ after {step}"
            quick.rig.check_accounts()
            for side in sides:
                side.heard.clear()
    finally:
        for side in sides:
            await side.rig.__aexit__()


@settings(deadline=None, max_examples=40)
@given(st.lists(steps, min_size=1, max_size=40), st.booleans())
def test_the_quick_ways_do_what_the_others_do(todo: list[tuple[Any, Any, Any]], beside_fp8: bool) -> None:
    asyncio.run(_compare(todo, with_disk=False, beside_fp8=beside_fp8))


def test_a_store_does_not_evict_the_block_that_it_goes_on_from() -> None:
    """Its blocks would lie behind a hole. 86 blocks in a slab of 85: something has to go."""
    todo = [("store", (0, 0, 1), 0), ("store", (1, 0, 43), 0), ("store", (0, 1, 42), 0), ("lookup", (0, 0, 43), False)]
    asyncio.run(_compare(todo, with_disk=False, beside_fp8=True))


def test_blocks_in_fp8_slow_down_their_own_namespace_and_class_only() -> None:
    async def scenario() -> None:
        async with Rig(small_settings()) as rig:
            lossy = await _fp8_beside(rig)
            session, space = rig.session(), Namespace(model="test", geometry=SHAPE)
            number, keys = await rig.register(session, space), make_keys(4)
            await rig.store(session, number, keys)
            copies, quick = rig.manager.copies, rig.manager.quick
            exact = next(entry for entry in copies.namespaces.entries if entry.namespace == space)
            masks = quick.lookup(exact, keys)
            assert masks is not None
            assert masks.size == 4
            assert quick.lookup(copies.namespaces[lossy], keys) is None
            forms = copies.shapes.forms
            assert not forms.touches(copies.host_class(exact))
            assert forms.touches(copies.host_class(copies.namespaces[lossy]))

    asyncio.run(scenario())


def test_a_host_tier_that_turns_over_many_times_is_the_same_either_way() -> None:
    random = np.random.default_rng(5)
    todo: list[tuple[Any, Any, Any]] = []
    for _ in range(120):
        span = (int(random.integers(PROMPTS * 3)), 0, int(random.integers(1, BLOCKS_MAX)))
        todo += [("lookup", span, False), ("read", span, False), ("release", 0, False), ("store", span, 0)]
        todo += [("sleep", float(random.choice([0.01, 1.0, 5.0])), False)]
    for beside_fp8 in (False, True):
        asyncio.run(_compare(todo, with_disk=False, beside_fp8=beside_fp8))
