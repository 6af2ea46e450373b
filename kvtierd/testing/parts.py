"""A prefix stored through the manager, read in parts, and what its bytes must be, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Bytes, Sums, layer_sums
from kvtierd.core.geometry import Geometry
from kvtierd.core.keys import Keys
from kvtierd.core.namespace import Namespace
from kvtierd.core.token_spans import of_tokens
from kvtierd.core.units import MIB
from kvtierd.protocol import messages as m
from kvtierd.protocol.service import Session
from kvtierd.storage.interface import BlockStore
from kvtierd.testing.rig import Rig, make_keys, pattern, reply_of, small_settings
from kvtierd.tiers.warm_host import Kept

TOKENS = 256
Found = tuple[m.AcquireReply, npt.NDArray[Any], npt.NDArray[Any], Sums]


def space_of(layout: str = "nhd", tokens: int = TOKENS) -> Namespace:
    """A small namespace whose blocks have parts, of as many sizes in memory as in tokens, with padding."""
    shape = Geometry(block_size=tokens, layers=2, kv_heads=2, k_dim=32, v_dim=8, dtype="fp16", layout=layout)
    return Namespace(model="model", geometry=shape)


def by_token(packed: Bytes, geometry: Geometry) -> Bytes:
    """A block's bytes as [layers, tokens, bytes of a token, K then V, head by head]."""
    layers = packed.reshape(geometry.layers, geometry.layer_bytes)
    heads, found = geometry.kv_heads, []
    for part in (layers[:, : geometry.k_bytes], layers[:, geometry.k_bytes :]):
        ordered = part
        if geometry.layout == "hnd":
            ordered = part.reshape(geometry.layers, heads, geometry.block_size, -1).transpose(0, 2, 1, 3)
        found.append(ordered.reshape(geometry.layers, geometry.block_size, -1))
    return np.concatenate(found, axis=2)


def right(keys: Keys, geometry: Geometry) -> Bytes:
    """What blocks must hold, as `by_token` has it."""
    return np.concatenate([by_token(pattern(key, geometry), geometry) for key in keys], axis=1)


def read_part(rig: Rig, geometry: Geometry, found: Found) -> tuple[Bytes, int]:
    """Leased tokens as `by_token` has them, and the first one's number; sums and order are checked."""
    _, descriptors, spans, sums = found
    parts, at = [], int(spans["begin"][0])
    for descriptor, span, mine in zip(descriptors, spans, sums, strict=True):
        of = of_tokens(geometry, int(span["tokens"]))
        assert (layer_sums(rig.slot(descriptor, of), of) == mine).all(), "an extent does not match its sums"
        assert span["begin"] == at, "extents do not follow each other"
        at += int(span["count"])
        first = int(span["first"])
        parts.append(by_token(rig.read(descriptor, of), of)[:, first : first + int(span["count"])])
    return np.concatenate(parts, axis=1), int(spans["begin"][0])


async def acquire_part(rig: Rig, session: Session, number: int, keys: Keys, **options: Any) -> Found:
    """Lease tokens of a prefix: (reply, descriptors, spans, layer sums)."""
    answer = await rig.call(session, m.AcquirePart(id=1, namespace=number, **options), keys.tobytes())
    descriptors, spans = np.frombuffer(answer.frames[0], m.SLOT_DTYPE), np.frombuffer(answer.frames[2], m.SPAN_DTYPE)
    sums = np.frombuffer(answer.frames[1], np.uint64)
    sums = sums.reshape(len(descriptors), sums.size // max(1, len(descriptors)))
    return reply_of(answer, m.AcquireReply), descriptors, spans, sums


async def reshape(rig: Rig, session: Session, number: int, keys: Keys, parts: Sequence[int]) -> int:
    """Ask for extents."""
    answer = await rig.call(session, m.Reshape(id=1, namespace=number, parts=list(parts)), keys.tobytes())
    return reply_of(answer, m.CountReply).count


class Stored:
    """A rig with a prefix stored in it; accounts are checked at the end."""

    def __init__(
        self,
        blocks: int = 4,
        layout: str = "nhd",
        tokens: int = TOKENS,
        store: BlockStore | None = None,
        kept: Kept | None = None,
    ) -> None:
        self.space = space_of(layout, tokens)
        self.shape = self.space.geometry
        self.rig = Rig(small_settings(capacity=8 * MIB), store, kept)
        self.keys = make_keys(blocks, namespace=self.space)

    async def __aenter__(self) -> Self:
        await self.rig.__aenter__()
        self.session = self.rig.session()
        self.number = await self.rig.register(self.session, self.space)
        if await self.rig.lookup(self.session, self.number, self.keys) < len(self.keys):  # or an earlier life did
            await self.rig.store(self.session, self.number, self.keys, self.shape)
        assert await self.rig.lookup(self.session, self.number, self.keys) == len(self.keys)
        return self

    async def __aexit__(self, *problem: object) -> None:
        if problem[0] is None:
            self.rig.check_accounts()
        await self.rig.__aexit__(*problem)

    async def reshape(self, parts: Sequence[int], keys: Keys | None = None) -> int:
        """Ask for extents, of all blocks unless told otherwise."""
        return await reshape(self.rig, self.session, self.number, self.keys if keys is None else keys, parts)

    async def acquire(self, **options: Any) -> tuple[m.AcquireReply, npt.NDArray[Any]]:
        """Lease all blocks whole."""
        return await self.rig.acquire(self.session, self.number, self.keys, **options)

    async def part(self, **options: Any) -> Found:
        """Lease tokens."""
        return await acquire_part(self.rig, self.session, self.number, self.keys, **options)

    async def whole_is_right(self) -> None:
        """Read all blocks whole; AssertionError where a byte is wrong."""
        reply, descriptors = await self.acquire(verify=True)
        assert reply.count == len(self.keys)
        for key, descriptor in zip(self.keys, descriptors, strict=True):
            assert (self.rig.read(descriptor, self.shape) == pattern(key, self.shape)).all()
        await self.rig.release(self.session, reply)

    async def part_is_right(self, begin: int, end: int) -> Found:
        """Read tokens; AssertionError where a byte is wrong."""
        found = await self.part(begin=begin, end=end)
        got, at = read_part(self.rig, self.shape, found)
        assert at == begin // 64 * 64
        assert (got == right(self.keys, self.shape)[:, at : at + got.shape[1]]).all()
        assert at + got.shape[1] >= end
        await self.rig.release(self.session, found[0])
        return found
