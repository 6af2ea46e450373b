"""Sequences of random KV stored through a manager, put into chosen tiers, and attended to.

The truth is `kvtierd.gpu.reference.attention`, in float64, over the numbers that were stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvtierd.core.checksum import Bytes, fill_and_sum
from kvtierd.core.geometry import Geometry
from kvtierd.core.keys import Keys
from kvtierd.core.namespace import Namespace
from kvtierd.gpu.reference.attention import default_scale, reference_attention
from kvtierd.protocol import messages as m
from kvtierd.protocol.service import Session
from kvtierd.testing.rig import Rig, make_keys, reply_of

Array = np.ndarray[Any, Any]


@dataclasses.dataclass
class RandomKv:
    """Blocks of random KV: `packed` as they are stored, `keys` and `values` by layer and block in float64."""

    namespace: Namespace
    names: Keys
    packed: list[Bytes]
    keys: list[list[Array]]
    values: list[list[Array]]

    @property
    def geometry(self) -> Geometry:
        """Shape of the blocks."""
        return self.namespace.geometry

    def reference(self, q: Array, layer: int, length: int, **options: Any) -> tuple[Array, Array]:
        """Output and log-sum-exp of float queries over the first `length` tokens of a layer, in float64."""
        size, v_dim = self.geometry.block_size, self.geometry.v_dim or int(options.get("v_dim", 0))
        blocks = []
        for number in range(-(-length // size)):
            tokens = min(size, length - number * size)
            k, v = self.keys[layer][number][:tokens], self.values[layer][number][:tokens]
            blocks.append((k, v[:, :, :v_dim], number * size))
        causal = options.get("causal", True)
        position = options.get("position")
        start = length - q.shape[0] if position is None else position
        return reference_attention(
            q,
            blocks,
            scale=options.get("scale") or default_scale(self.geometry.k_dim),
            v_dim=v_dim,
            position=start if causal else None,
            window=options.get("window", 0),
            soft_cap=options.get("soft_cap", 0.0),
            sinks=options.get("sinks"),
        )


def random_kv(geometry: Geometry, blocks: int, seed: int = 0, model: str = "attend") -> RandomKv:
    """Normal deviates in the dtype of the geometry (bf16, fp16 or fp32)."""
    rng = np.random.default_rng(seed)
    namespace = Namespace(model=model, geometry=geometry)
    found = RandomKv(namespace, make_keys(blocks, start=seed + 1, namespace=namespace), [], [], [])
    found.keys = [[] for _ in range(geometry.layers)]
    found.values = [[] for _ in range(geometry.layers)]
    for _ in range(blocks):
        layers = []
        for layer in range(geometry.layers):
            for dim, kept in ((geometry.k_dim, found.keys), (geometry.v_dim, found.values)):
                raw, meant = as_stored(rng.standard_normal((geometry.block_size, geometry.kv_heads, dim)), geometry)
                layers.append(raw)
                kept[layer].append(meant)
            if not geometry.v_dim:
                found.values[layer][-1] = found.keys[layer][-1]
        found.packed.append(np.concatenate(layers))
    return found


def as_stored(numbers: Array, geometry: Geometry) -> tuple[Bytes, Array]:
    """[tokens, heads, dim] as bytes in the dtype and layout of a geometry, and what they stand for."""
    ordered = numbers.transpose(1, 0, 2) if geometry.layout == "hnd" else numbers
    if geometry.dtype == "bf16":
        bits = (ordered.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        raw: Array = np.ascontiguousarray(bits)
        meant = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    else:
        raw = np.ascontiguousarray(ordered.astype(np.float16 if geometry.dtype == "fp16" else np.float32))
        meant = raw.astype(np.float64)
    return raw.reshape(-1).view(np.uint8), meant.transpose(1, 0, 2) if geometry.layout == "hnd" else meant


class AttendRig:
    """A rig with one client and a sequence of random KV; the rig's own methods are at `rig`."""

    def __init__(self, rig: Rig, kv: RandomKv, session: Session, number: int) -> None:
        self.rig, self.kv, self.session, self.number = rig, kv, session, number

    @classmethod
    async def make(cls, rig: Rig, kv: RandomKv, session: Session | None = None) -> AttendRig:
        """Register and store."""
        client = session or rig.session()
        made = cls(rig, kv, client, await rig.register(client, kv.namespace))
        await made.store(range(len(kv.names)))
        return made

    async def store(self, blocks: Iterable[int]) -> None:
        """Store some of the blocks; AssertionError where one finds no room."""
        which = list(blocks)
        shape = self.kv.geometry
        grant = await self.rig.reserve(self.session, self.number, self.kv.names[which])
        sums = np.zeros((len(which), shape.layers), np.uint64)
        for i, block in enumerate(which):
            assert grant.descriptors[i]["status"] == m.SLOT_GRANTED, f"block {block} was not granted a slot"
            fill_and_sum(self.kv.packed[block], self.rig.slot(grant.descriptors[i], shape), shape, sums[i])
        assert (await self.rig.commit(self.session, grant, sums)).committed == len(which)

    async def place(self, tiers: Sequence[m.Tier]) -> None:
        """Have block i in tier `tiers[i]`; all are on disk too. Needs a store, and a gpu tier for blocks there."""
        where = np.array(tiers)
        await self.rig.call(self.session, m.Flush(id=1))
        await self._purge("gpu", "host")
        for tier in ("gpu", "host"):
            names = self.kv.names[np.flatnonzero(where == tier)]
            if len(names):
                request = m.Prefetch(id=1, namespace=self.number, tier="gpu" if tier == "gpu" else "host", wait=True)
                answer = await self.rig.call(self.session, request, names.tobytes())
                assert reply_of(answer, m.CountReply).count == len(names), f"{tier} has no room"
            if tier == "gpu":
                await self._purge("host")

    async def _purge(self, *tiers: m.Tier) -> None:
        await self.rig.call(self.session, m.Purge(id=1, namespace=self.number, tiers=list(tiers)))

    async def open(self, blocks: int | None = None, **options: Any) -> int:
        """Open a sequence of the first blocks, by default all."""
        return (await self.opened(blocks, **options)).sequence

    async def opened(self, blocks: int | None = None, **options: Any) -> m.SequenceReply:
        """As `open`: the whole reply."""
        names = self.kv.names if blocks is None else self.kv.names[:blocks]
        request = m.OpenSequence(id=1, namespace=self.number, **options)
        return reply_of(await self.rig.call(self.session, request, names.tobytes()), m.SequenceReply)

    async def attend(
        self, sequence: int, q: Array, layer: int = 0, **options: Any
    ) -> tuple[Array, Array, m.AttendReply]:
        """Attention of float32 queries: output, log-sum-exp, and the reply."""
        frames = [np.ascontiguousarray(q, np.float32).tobytes()]
        if (sinks := options.pop("sinks", None)) is not None:
            frames.append(np.ascontiguousarray(sinks, np.float32).tobytes())
        request = m.Attend(
            id=1,
            sequence=sequence,
            layers=[layer],
            queries=q.shape[0],
            heads=q.shape[1],
            dtype="fp32",
            sinks=sinks is not None,
            **options,
        )
        answer = await self.rig.call(self.session, request, *frames)
        v_dim = self.kv.geometry.v_dim or int(options.get("v_dim", 0))
        output = np.frombuffer(answer.frames[0], np.float32).reshape(*q.shape[:2], v_dim)
        return output, np.frombuffer(answer.frames[1], np.float32).reshape(q.shape[:2]), reply_of(answer, m.AttendReply)
