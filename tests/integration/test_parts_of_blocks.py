"""Clients split, merge and read parts of blocks against a real daemon."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvtierd import AsyncClient, Client
from kvtierd.core.errors import RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.core.keys import block_keys
from kvtierd.core.namespace import Namespace

SHAPE = Geometry(block_size=256, layers=3, kv_heads=2, k_dim=32, v_dim=16, dtype="fp16")
SPACE = Namespace(model="parts", geometry=SHAPE)
TOKEN_BYTES = 2 * 2


def blocks_of(count, prompt):
    keys = block_keys(SPACE.digest(), np.arange(count * 256, dtype=np.uint32) + prompt * 10_000, 256)
    return keys, np.random.default_rng(prompt).integers(0, 256, (count, SHAPE.block_bytes), np.uint8)


def tokens_of(packed, tokens):
    """[layers, tokens, bytes of a token]"""
    layers = packed.reshape(SHAPE.layers, -1)
    middle = tokens * 32 * TOKEN_BYTES
    keys, values = layers[:, :middle], layers[:, middle:]
    return np.concatenate([keys.reshape(3, tokens, -1), values.reshape(3, tokens, -1)], axis=2)


def check(part, content, begin, end):
    wanted = np.concatenate([tokens_of(block, 256) for block in content], axis=1)
    assert (part.begin, part.tokens) == (begin, end - begin)
    assert (tokens_of(part.data, part.tokens) == wanted[:, begin:end]).all()


def test_parts_are_read_byte_for_byte_whatever_extents_blocks_lie_in(client: Client):
    space, (keys, content) = client.register(SPACE), blocks_of(4, 1)
    assert client.store(space, keys, content).stored == 4
    for parts in ([256] * 4, [64, 192, 512, 256], [512, 512], [64] * 16, [256] * 4):
        assert client.reshape(space, keys, parts) == 4
        for begin, end in ((0, 1024), (3, 4), (63, 65), (200, 900)):
            check(client.fetch_part(space, keys, begin, end), content, begin, end)
    assert (client.fetch(space, keys).blocks == content).all()
    assert client.stats()["leases"] == 0


def test_an_asynchronous_client_does_the_same(client: Client):
    async def scenario():
        async with AsyncClient(client.endpoint) as other:
            space, (keys, content) = await other.register(SPACE), blocks_of(4, 2)
            await other.store(space, keys, content)
            assert await other.reshape(space, keys, [512, 128, 128, 256]) == 4
            found = await asyncio.gather(*(other.fetch_part(space, keys, at, at + 100) for at in range(0, 900, 50)))
            for at, part in zip(range(0, 900, 50), found, strict=True):
                check(part, content, at, at + 100)

    asyncio.run(scenario())


def test_parts_that_are_not_there_are_nothing(client: Client):
    space, (keys, content) = client.register(SPACE), blocks_of(4, 3)
    client.store(space, keys[:2], content[:2])
    assert client.fetch_part(space, keys, 600, 700).tokens == 0
    check(client.fetch_part(space, keys, 400, 700), content, 400, 512)
    assert client.reshape(space, keys, [512, 512]) == 0
    with pytest.raises(RequestError, match="1025"):
        client.fetch_part(space, keys, 0, 1025)
    with pytest.raises(RequestError, match="100 tokens"):
        client.reshape(space, keys[:1], [100, 156])
