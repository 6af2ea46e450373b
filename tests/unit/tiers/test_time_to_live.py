"""Blocks that nobody uses within their namespace's time are misses at once, and gone soon."""

from __future__ import annotations

import msgspec
import pytest

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.namespace import Namespace
from kvtierd.protocol import messages as m
from kvtierd.testing.held_files import HeldFiles
from kvtierd.testing.lives import fetched, life, on_loop
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import SHAPE, Rig, make_keys, small_settings

KEYS = make_keys(10)
SPACE = Namespace(model="short", geometry=SHAPE)


async def register(rig: Rig, session, ttl_s: int, namespace: Namespace = SPACE) -> int:
    request = m.RegisterNamespace(id=1, namespace=namespace, ttl_s=ttl_s)
    return (await rig.call(session, request)).reply.namespace


@on_loop
async def test_expired_blocks_are_misses_and_can_be_stored_again() -> None:
    async with Rig() as rig:
        session = rig.session()
        short = await register(rig, session, 60)
        lasting = await rig.register(session)
        await rig.store(session, short, KEYS)
        await rig.store(session, lasting, KEYS)
        rig.clock.advance(59)
        assert await rig.lookup(session, short, KEYS) == 10
        rig.clock.advance(1)
        assert await rig.lookup(session, short, KEYS) == 0
        assert await rig.lookup(session, lasting, KEYS) == 10
        assert await rig.store(session, short, KEYS) == 10
        assert await rig.lookup(session, short, KEYS) == 10
        assert rig.manager.stats()["expired_blocks"] == 10
        rig.check_accounts()


@on_loop
async def test_use_begins_the_time_anew_and_a_hole_ends_the_prefix() -> None:
    async with Rig() as rig:
        session = rig.session()
        short = await register(rig, session, 60)
        await rig.store(session, short, KEYS)
        rig.clock.advance(40)
        assert await fetched(rig, session, short, KEYS[:4]) == 4
        rig.clock.advance(40)
        assert await rig.lookup(session, short, KEYS) == 4
        rig.check_accounts()


@on_loop
async def test_space_of_what_nobody_asks_for_is_reclaimed_in_every_tier() -> None:
    store = MemoryStore()
    async with Rig(store=store) as rig:
        session = rig.session()
        short = await register(rig, session, 60)
        await rig.store(session, short, KEYS)
        await rig.manager.drain()
        assert len(store.blocks) == 10
        rig.clock.advance(60)
        rig.manager.expiry.step()
        await rig.manager.drain()
        assert rig.manager.stats()["host_used_bytes"] == 0
        assert store.blocks == {}
        rig.check_accounts()


@on_loop
async def test_setting_holds_for_all_and_the_shorter_time_wins() -> None:
    async with Rig() as rig:
        session = rig.session()
        plain, long = await rig.register(session), await register(rig, session, 600)
        for number in (plain, long):
            await rig.store(session, number, KEYS)
        cache = msgspec.structs.replace(rig.settings.kv_cache_config, ttl_s=120)
        rig.manager.apply(msgspec.structs.replace(rig.settings, kv_cache_config=cache))
        later = await register(rig, session, 30, Namespace(model="later", geometry=SHAPE))
        await rig.store(session, later, KEYS)
        rig.clock.advance(30)
        assert [await rig.lookup(session, number, KEYS) for number in (plain, long, later)] == [10, 10, 0]
        rig.clock.advance(90)
        assert [await rig.lookup(session, number, KEYS) for number in (plain, long, later)] == [0, 0, 0]
        rig.manager.apply(small_settings())
        await rig.store(session, plain, KEYS)
        rig.clock.advance(1_000_000)
        assert await rig.lookup(session, plain, KEYS) == 10


@on_loop
async def test_shortest_time_that_a_client_named_holds_over_restarts_too() -> None:
    files = HeldFiles()
    async with life(files) as (rig, session, _):
        for ttl_s in (100, 50, 0, 70):
            number = await register(rig, session, ttl_s)
        await rig.store(session, number, KEYS)
    async with life(files) as (rig, session, _):
        number = await register(rig, session, 0)
        assert await rig.lookup(session, number, KEYS) == 10
        rig.clock.advance(50)
        assert await rig.lookup(session, number, KEYS) == 0
        rig.check_accounts()
    files.close()


@on_loop
async def test_pinned_blocks_stay() -> None:
    async with Rig() as rig:
        session = rig.session()
        short = await register(rig, session, 60)
        await rig.store(session, short, KEYS)
        await rig.call(session, m.Pin(id=1, namespace=short), KEYS[:2].tobytes())
        rig.clock.advance(60)
        assert await rig.lookup(session, short, KEYS) == 2


@on_loop
async def test_time_that_cannot_be_is_refused() -> None:
    async with Rig() as rig:
        with pytest.raises(RequestError, match=r"ttl_s is -1; it must be in 0\.\.") as caught:
            await register(rig, rig.session(), -1)
        assert caught.value.code is ErrorCode.BAD_ARGUMENT
