"""Operators choose blocks across clients: to look at them, to keep them, to be rid of them."""

from __future__ import annotations

import pytest

from kvtierd.core.errors import RequestError
from kvtierd.core.namespace import Namespace
from kvtierd.testing.lives import on_loop
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import SHAPE, Rig, make_keys
from kvtierd.tiers.operator import Selection

KEYS = make_keys(10)
OTHERS = make_keys(5, start=9)


async def filled(rig: Rig) -> dict[str, tuple]:
    """Two namespaces of one tenant and one of another, 10, 5 and 5 blocks, by name: (session, number, keys)."""
    found = {}
    for model, tenant, keys in (("a", "default", KEYS), ("b", "default", OTHERS), ("a", "other", OTHERS)):
        session = rig.session(tenant=tenant)
        number = await rig.register(session, Namespace(model=model, geometry=SHAPE))
        assert await rig.store(session, number, keys) == len(keys)
        found[f"{tenant}/{model}"] = (session, number, keys)
    return found


async def left(rig: Rig, spaces: dict[str, tuple]) -> list[int]:
    return [await rig.lookup(*space) for space in spaces.values()]


@pytest.mark.parametrize(
    ("chosen", "stay"),
    [
        (Selection(), [0, 0, 0]),
        (Selection(tenant="other"), [10, 5, 0]),
        (Selection(namespace="a"), [0, 5, 0]),
        (Selection(namespace=Namespace(model="b", geometry=SHAPE).digest().hex()[:12]), [10, 0, 5]),
        (Selection(namespace="a", tenant="default"), [0, 5, 5]),
        (Selection(key=KEYS[4].tobytes().hex()), [4, 5, 5]),
        (Selection(key=KEYS[4].tobytes().hex()[:7]), [4, 5, 5]),
        (Selection(namespace="nobody's"), [10, 5, 5]),
    ],
)
@on_loop
async def test_purge_forgets_what_is_chosen_and_nothing_else(chosen: Selection, stay: list[int]) -> None:
    async with Rig() as rig:
        spaces = await filled(rig)
        before = sum(await left(rig, spaces))
        count = await rig.manager.operator.purge(chosen)
        assert await left(rig, spaces) == stay
        gone = before - count
        assert gone == 20 - count
        rig.check_accounts()


@on_loop
async def test_purge_is_durable_when_it_returns() -> None:
    store = MemoryStore()
    async with Rig(store=store) as rig:
        spaces = await filled(rig)
        await rig.manager.drain()
        assert len(store.blocks) == 20
        assert await rig.manager.operator.purge(Selection(namespace="b")) == 5
        assert len(store.blocks) == 15
        flushes = store.flushes
        store.fail_flushes = 1
        with pytest.raises(RequestError, match="nvme"):
            await rig.manager.operator.purge(Selection(tenant="other"))
        assert store.flushes >= flushes
        assert await left(rig, spaces) == [10, 0, 0]


@on_loop
async def test_age_is_the_time_since_the_last_use() -> None:
    async with Rig() as rig:
        spaces = await filled(rig)
        rig.clock.advance(100)
        session, number, keys = spaces["default/a"]
        reply, _ = await rig.acquire(session, number, keys[:3])
        await rig.release(session, reply)
        rig.clock.advance(50)
        assert await rig.manager.operator.purge(Selection(older_than_s=151)) == 0
        found, total = await rig.manager.operator.blocks(Selection(older_than_s=150), 100)
        assert (len(found), total) == (17, 17)
        assert await rig.manager.operator.purge(Selection(older_than_s=150)) == 17
        assert await left(rig, spaces) == [3, 0, 0]


@on_loop
async def test_blocks_are_described_up_to_a_limit_and_counted_beyond() -> None:
    async with Rig() as rig:
        await filled(rig)
        found, total = await rig.manager.operator.blocks(Selection(namespace="a"), 7)
        assert (len(found), total) == (7, 15)
        assert found[0] == {
            "key": KEYS[0].tobytes().hex(),
            "tenant": "default",
            "model": "a",
            "digest": Namespace(model="a", geometry=SHAPE).digest().hex(),
            "tiers": ["host"],
            "bytes": SHAPE.slot_bytes,
            "age_s": 0,
            "pins": 0,
        }


@on_loop
async def test_operators_pins_keep_blocks_until_they_are_taken_back() -> None:
    async with Rig() as rig:
        spaces = await filled(rig)
        assert await rig.manager.operator.pin(Selection(namespace="b")) == 5
        assert await rig.manager.operator.pin(Selection(namespace="b")) == 0
        assert rig.manager.stats()["pinned_bytes"] == 5 * SHAPE.slot_bytes
        session, number, _ = spaces["default/a"]
        for start in range(20, 40):
            await rig.store(session, number, make_keys(20, start=start))
        assert await rig.lookup(*spaces["default/b"]) == 5
        assert await rig.manager.operator.unpin(Selection()) == 5
        assert rig.manager.stats()["pinned_bytes"] == 0
        rig.check_accounts()


@on_loop
async def test_eviction_drops_what_is_elsewhere_and_says_what_stays() -> None:
    store = MemoryStore()
    async with Rig(store=store) as rig:
        spaces = await filled(rig)
        await rig.manager.drain()
        rig.manager.take_stores(yes=True)
        session, number, _ = spaces["default/a"]
        held, _ = await rig.acquire(session, number, KEYS[:2])
        assert await rig.manager.operator.evict(Selection(namespace="a", tenant="default"), "host") == (8, 2)
        await rig.release(session, held)
        store.stall.clear()
        await rig.store(session, number, make_keys(3, start=50))
        assert await rig.manager.operator.evict(Selection(key=make_keys(3, start=50)[0].tobytes().hex()), "host") == (
            0,
            1,
        )
        assert await left(rig, spaces) == [10, 5, 5]
        store.stall.set()
        with pytest.raises(ValueError, match="nvme are not evicted"):
            await rig.manager.operator.evict(Selection(), "nvme")
        rig.check_accounts()


def test_key_that_is_no_hexadecimal_is_refused() -> None:
    with pytest.raises(ValueError, match="key is 'xyz'"):
        Selection(key="xyz")
