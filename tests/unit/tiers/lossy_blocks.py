"""Blocks of numbers as keys and values have them, for namespaces that allow loss: what tests of compression store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from kvtierd.config.schema import Compression, KvCache, Settings
from kvtierd.core.checksum import Bytes, Sums, fill_and_sum, layer_sums
from kvtierd.core.geometry import Geometry
from kvtierd.core.keys import Keys
from kvtierd.core.namespace import Namespace
from kvtierd.core.stored_form import EncodedLayout
from kvtierd.gpu.codec import BlockCodec
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.protocol import messages as m
from kvtierd.protocol.service import Session
from kvtierd.storage.interface import BlockStore
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import Grant, Rig, make_keys, reply_of, small_settings
from kvtierd.tiers.blocks import Rows
from kvtierd.tiers.warm_host import Kept

PLAIN = Geometry(block_size=16, layers=3, kv_heads=2, k_dim=96, v_dim=64, dtype="bf16")
"""12 KiB a layer, 8 KiB in FP8; K and V dims differ."""
SHAPES = {
    "bf16": PLAIN,
    "fp16 hnd": Geometry(block_size=16, layers=2, kv_heads=4, k_dim=64, v_dim=64, dtype="fp16", layout="hnd"),
    "fp32": Geometry(block_size=8, layers=2, kv_heads=3, k_dim=80, v_dim=80, dtype="fp32"),
    "latent": Geometry(block_size=16, layers=2, kv_heads=1, k_dim=576, v_dim=0, dtype="bf16"),
}


def settings(threshold: int = 10, *, enabled: bool = True, gpu: bool = False, **host: Any) -> Settings:
    """Small tiers; blocks are cold below `threshold`."""
    base = small_settings(**host)
    cache = KvCache(compression=Compression(enabled=enabled, threshold=threshold), prefetch_window=0)
    changes: dict[str, Any] = {"kv_cache_config": cache}
    if not gpu:
        changes["gpu"] = type(base.gpu)(device="host", capacity=0)
    return Settings(**{name: changes.get(name, getattr(base, name)) for name in base.__struct_fields__})


def numbers(key: Bytes, geometry: Geometry) -> Bytes:
    """A block's packed bytes: normal deviates made from its key, some channels of which are large."""
    rng = np.random.default_rng(int.from_bytes(key.tobytes()[:8], "little"))
    width = {"fp32": 4}.get(geometry.dtype, 2)
    values = rng.standard_normal(geometry.block_bytes // width).astype(np.float32)
    values[:: geometry.k_dim] *= 30
    if geometry.dtype == "fp16":
        return values.astype(np.float16).view(np.uint8)
    if geometry.dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.view(np.uint8)


def after_fp8(packed: Bytes, geometry: Geometry) -> Bytes:
    """What FP8 makes of a packed block: encoded and decoded, packed."""
    slot = np.zeros(geometry.slot_bytes, np.uint8)
    fill_and_sum(packed, slot, geometry, np.empty(geometry.layers, np.uint64))
    coded, back = np.zeros(EncodedLayout(geometry).slot_bytes, np.uint8), np.zeros_like(slot)
    BlockCodec(geometry).encode(slot, coded)
    BlockCodec(geometry).decode(coded, back)
    parts = back.reshape(geometry.layers, geometry.layer_stride)[:, : geometry.layer_bytes]
    return np.ascontiguousarray(parts).reshape(-1)


MIB = 1 << 20


class LossyRig(Rig):
    """A rig with a namespace of its own, which a client registers and fills with `numbers`."""

    def __init__(
        self,
        settings: Settings,
        store: BlockStore | None = None,
        geometry: Geometry = PLAIN,
        kept: Kept | None = None,
    ) -> None:
        super().__init__(settings, store, kept)
        self.space = Namespace(model="lossy", geometry=geometry)
        self.geometry = geometry

    async def client(self, *, allow_loss: bool = True) -> tuple[Session, int]:
        """Say hello and register: the session, and the namespace's number in it."""
        session = self.session()
        return session, await self.register(session, self.space, allow_loss=allow_loss)

    def keys(self, count: int, start: int = 0) -> Keys:
        """Keys of a prompt."""
        return make_keys(count, start=start, namespace=self.space)

    def fill(self, grant: Grant, keys: Keys, geometry: Geometry = PLAIN) -> Sums:
        """Write the numbers of each granted block."""
        granted = np.flatnonzero(grant.descriptors["status"] == m.SLOT_GRANTED)
        sums = np.zeros((granted.size, geometry.layers), np.uint64)
        for i, place in enumerate(granted.tolist()):
            slot = self.slot(grant.descriptors[place], geometry)
            fill_and_sum(numbers(keys[place], geometry), slot, geometry, sums[i])
        return sums

    def rows(self, keys: Keys) -> Rows:
        """Rows of visible blocks."""
        entries = self.manager.copies.namespaces.entries
        entry = next(entry for entry in entries if entry.namespace == self.space)
        return self.manager.copies.blocks.find(keys, entry.number)

    def exact(self, key: Bytes) -> Bytes:
        """What was stored, packed."""
        return numbers(key, self.geometry)

    def lossy(self, key: Bytes) -> Bytes:
        """What FP8 makes of it."""
        return after_fp8(self.exact(key), self.geometry)

    async def fetch(self, session: Session, number: int, keys: Keys) -> tuple[list[Bytes], bytes]:
        """Acquire, read, release: packed blocks, each checked against its layer sums, and the codecs of the reply."""
        answer = await self.call(session, m.Acquire(id=1, namespace=number), keys.tobytes())
        reply = reply_of(answer, m.AcquireReply)
        descriptors = np.frombuffer(answer.frames[0], m.SLOT_DTYPE)
        sums = np.frombuffer(answer.frames[1], "<u8").reshape(reply.count, self.geometry.layers)
        found = []
        for descriptor, wanted in zip(descriptors, sums, strict=True):
            assert (layer_sums(self.slot(descriptor, self.geometry), self.geometry) == wanted).all()
            found.append(self.read(descriptor, self.geometry))
        if reply.lease:
            await self.release(session, reply)
        return found, reply.codecs

    async def compressed(self, count: int, seconds: int = 30) -> None:
        """Let blocks rest for so long, and the ticker work until `count` of them are compressed in host."""
        self.clock.advance(seconds)
        for _ in range(200):
            if self.manager.copies.shapes.forms.count >= count:
                return
            await asyncio.sleep(0.02)
        stats = {name: value for name, value in self.manager.stats().items() if "compress" in name}
        raise AssertionError(f"{count} blocks were never compressed: {stats}")


Scenario = Callable[[LossyRig], Awaitable[None]]


def run(scenario: Scenario, store: MemoryStore | None = None, **options: Any) -> None:
    """Run with a rig of these settings, and of a geometry of its own."""
    geometry = options.pop("geometry", PLAIN)
    options = {"capacity": 8 * MIB, **options}

    async def body() -> None:
        async with LossyRig(settings(**options), store, geometry) as rig:
            await scenario(rig)
            rig.check_accounts()

    asyncio.run(body())


async def flush(rig: LossyRig, session: Session) -> None:
    """Return when all is on disk."""
    await rig.call(session, m.Flush(id=1))


def count(rig: LossyRig, name: str) -> float:
    """A statistic."""
    return rig.manager.stats()[name]


def all_of(rig: LossyRig) -> tuple[SlotClass, Slots]:
    """Every slot of the namespace's class in host that has a block."""
    host = rig.manager.copies.host
    cls = rig.manager.copies.host_class(rig.manager.copies.namespaces.entries[0])
    slots = np.concatenate([host.pool.slots_of(slab) for slab in cls.slabs])
    return cls, slots[host.pool.row[slots] >= 0]
