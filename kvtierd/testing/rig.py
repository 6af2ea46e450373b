"""A tier manager with a client's side in the same process: real chunks, real checksums, no sockets, a manual clock."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvtierd.config.schema import Gpu, Host, Leases, Nvme, Settings
from kvtierd.core.checksum import Bytes, Sums, block_sum, fill_and_sum
from kvtierd.core.clock import ManualClock
from kvtierd.core.geometry import Geometry
from kvtierd.core.keys import Keys, block_keys
from kvtierd.core.namespace import Namespace
from kvtierd.core.units import MIB
from kvtierd.gpu import open_device
from kvtierd.index.block_table import NO_NAMESPACE
from kvtierd.protocol import messages as m
from kvtierd.protocol.service import Answer, Session
from kvtierd.storage.interface import BlockStore
from kvtierd.tiers.arena import Chunk
from kvtierd.tiers.compress_forms import EXTENT
from kvtierd.tiers.manager import TierManager
from kvtierd.tiers.warm_host import Kept

R = TypeVar("R")

SHAPE = Geometry(block_size=16, layers=3, kv_heads=2, k_dim=32, v_dim=16, dtype="bf16")
"""Small, with K and V dims that differ and layer parts that need padding (3,072 of 4,096 bytes)."""


def small_settings(**host: Any) -> Settings:
    """A host tier of two 1 MiB chunks and a gpu tier of one."""
    return Settings(
        host=Host(**{"capacity": 2 * MIB, "chunk_bytes": MIB, "watermark": 0.95, **host}),
        gpu=Gpu(device="host", capacity=MIB),
        nvme=Nvme(write_queue_bytes=MIB),
        leases=Leases(ttl_ms=1000, reservation_ttl_ms=1000, max_leases=64),
        worker_threads=2,
        max_blocks=4096,
    )


def make_keys(count: int, *, start: int = 0, namespace: Namespace | None = None) -> Keys:
    """Keys of a prefix of `count` blocks; another `start` is another prompt."""
    shape = namespace.geometry if namespace else SHAPE
    digest = namespace.digest() if namespace else bytes(32)
    tokens = np.arange(count * shape.block_size, dtype=np.uint32) + start * 1_000_000
    return block_keys(digest, tokens, shape.block_size)


def pattern(key: Bytes, geometry: Geometry) -> Bytes:
    """A block's packed bytes, made from its key alone, so that every reader knows what is right."""
    seed = int.from_bytes(key.tobytes()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, geometry.block_bytes, np.uint8)


@dataclasses.dataclass
class Grant:
    """A reservation as a client sees it."""

    id: int
    descriptors: npt.NDArray[Any]


class Rig:
    """Use as an async context manager; `settled` waits until the arena has its memory."""

    def __init__(
        self,
        settings: Settings | None = None,
        store: BlockStore | None = None,
        kept: Kept | None = None,
        seed: int | None = None,
    ) -> None:
        self.settings = settings or small_settings()
        self.clock = ManualClock(1_000_000_000)
        device = open_device(self.settings.gpu) if self.settings.gpu.capacity else None
        self.manager = TierManager(self.settings, store=store, device=device, clock=self.clock, seed=seed, kept=kept)
        self._ids = itertools.count(1)

    async def __aenter__(self) -> Self:
        await self.manager.start()
        await self.settled()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.manager.close()

    async def settled(self) -> None:
        """Wait for the arena's memory."""
        await self.manager.memory_ready()

    def session(self, *, attached: bool = True, tenant: str = "default") -> Session:
        """A client that has said Hello, and attached to the arena unless told otherwise."""
        number = next(self._ids)
        session = Session(id=number, tenant=tenant, client=f"test-{number}", token=bytes(16))
        if attached:
            session.pid, session.pidfd = 1, 0
        self.manager.session_opened(session)
        return session

    async def call(self, session: Session, request: m.AnyRequest, *frames: bytes) -> Answer:
        """Send a request through its wire form, as the server would."""
        decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=m.AnyRequest)
        answer = self.manager.handle(session, decoded, [memoryview(frame) for frame in frames])
        return answer if isinstance(answer, Answer) else await answer

    async def register(self, session: Session, namespace: Namespace | None = None, *, allow_loss: bool = False) -> int:
        """Register a namespace, by default one of SHAPE."""
        known = namespace or Namespace(model="test", geometry=SHAPE)
        reply = (await self.call(session, m.RegisterNamespace(id=1, namespace=known, allow_loss=allow_loss))).reply
        assert isinstance(reply, m.NamespaceReply)
        return reply.namespace

    async def reserve(self, session: Session, namespace: int, keys: Keys) -> Grant:
        """Reserve."""
        answer = await self.call(session, m.Reserve(id=1, namespace=namespace), keys.tobytes())
        assert isinstance(answer.reply, m.ReserveReply)
        return Grant(answer.reply.reservation, np.frombuffer(answer.frames[0], m.SLOT_DTYPE))

    def slot(self, descriptor: npt.NDArray[Any], geometry: Geometry = SHAPE) -> Bytes:
        """The memory that a descriptor names, as a client maps it."""
        begin = int(descriptor["offset"])
        return self._chunk(descriptor).memory[begin : begin + geometry.slot_bytes]

    def generation(self, descriptor: npt.NDArray[Any], geometry: Geometry = SHAPE) -> int:
        """The slot's generation as the shared table shows it now."""
        self._chunk(descriptor)
        table = self.manager.copies.host.shared_generations(int(descriptor["chunk"]))
        return int(table[int(descriptor["offset"]) // geometry.slot_bytes])

    def _chunk(self, descriptor: npt.NDArray[Any]) -> Chunk:
        host, number = self.manager.copies.host, int(descriptor["chunk"])
        tenants = {cls.tenant for cls in host.pool.classes}
        found = next(filter(None, (host.chunk_of(number, tenant) for tenant in tenants)), None)
        assert found is not None, "the descriptor names a chunk that is gone"
        return found[0]

    def fill(self, grant: Grant, keys: Keys, geometry: Geometry = SHAPE) -> Sums:
        """Write the pattern of each granted block; its layer sums, [granted, layers]."""
        granted = np.flatnonzero(grant.descriptors["status"] == m.SLOT_GRANTED)
        sums = np.zeros((granted.size, geometry.layers), np.uint64)
        for i, place in enumerate(granted.tolist()):
            fill_and_sum(
                pattern(keys[place], geometry), self.slot(grant.descriptors[place], geometry), geometry, sums[i]
            )
        return sums

    async def commit(self, session: Session, grant: Grant, sums: Sums, **options: Any) -> m.CommitReply:
        """Commit with the block sums that belong to the layer sums."""
        totals = np.array([block_sum(row) for row in sums], np.uint64)
        request = m.Commit(id=1, reservation=grant.id, **options)
        return reply_of(await self.call(session, request, sums.tobytes(), totals.tobytes()), m.CommitReply)

    async def store(self, session: Session, namespace: int, keys: Keys, geometry: Geometry = SHAPE) -> int:
        """Reserve, write, commit; how many blocks became visible."""
        grant = await self.reserve(session, namespace, keys)
        if not grant.id:
            return 0
        return (await self.commit(session, grant, self.fill(grant, keys, geometry))).committed

    async def acquire(
        self, session: Session, namespace: int, keys: Keys, **options: Any
    ) -> tuple[m.AcquireReply, npt.NDArray[Any]]:
        """Lease a prefix: (reply, descriptors)."""
        answer = await self.call(session, m.Acquire(id=1, namespace=namespace, **options), keys.tobytes())
        return reply_of(answer, m.AcquireReply), np.frombuffer(answer.frames[0], m.SLOT_DTYPE)

    async def release(self, session: Session, reply: m.AcquireReply) -> None:
        """End a lease."""
        await self.call(session, m.Release(id=1, leases=[reply.lease]))

    async def lookup(self, session: Session, namespace: int, keys: Keys) -> int:
        """Length of the stored prefix."""
        answer = await self.call(session, m.Lookup(id=1, namespaces=[namespace]), keys.tobytes())
        return reply_of(answer, m.LookupReply).hit

    def read(self, descriptor: npt.NDArray[Any], geometry: Geometry = SHAPE) -> Bytes:
        """A leased block's packed bytes."""
        slot = self.slot(descriptor, geometry).reshape(geometry.layers, geometry.layer_stride)
        return np.ascontiguousarray(slot[:, : geometry.layer_bytes]).reshape(-1)

    def _scattered(self) -> npt.NDArray[np.bool_]:
        """Which rows are in host, but only in extents of other sizes; each must have its rows and be whole."""
        copies, table = self.manager.copies, self.manager.copies.blocks.table
        used = np.arange(table.used_rows, dtype=np.int32)
        used = used[table.namespace[used] != NO_NAMESPACE]
        scattered = copies.shapes.scattered(used)
        coded = copies.shapes.forms.mask(used)
        assert not (coded & ~scattered).any(), "a block has a compressed form and is not in host by it alone"
        assert int(np.count_nonzero(coded)) == copies.shapes.forms.count, "compressed forms are counted wrong"
        for row in used[scattered & ~coded].tolist():
            tokens = copies.namespaces[int(table.namespace[row])].geometry.block_size
            pieces = copies.shapes.pieces(np.array([row], np.int32), tokens, 0, tokens)
            assert pieces[:, 1].sum() == tokens, "the extents of a block are not all of it"
            assert (copies.shapes.slots(pieces) >= 0).all(), "a block is in host and some of its extents are not"
            assert (table.marks[pieces[:, 2]] & EXTENT).all(), "a block lies in what is no extent"
            assert all(row in copies.shapes.blocks_in(int(place)) for place in pieces[:, 2]), "an extent lost its block"
        return scattered

    def check_accounts(self) -> None:
        """Slots, rows and holds must agree with each other; AssertionError says what does not."""
        copies = self.manager.copies
        table = copies.blocks.table
        for tier, column in ((copies.host, table.host_slot), (copies.gpu, table.gpu_slot)):
            if tier is None:
                continue
            rows = np.flatnonzero(column[: table.used_rows] >= 0)
            rows = rows[table.flags[rows] != 0]
            extents = int(np.count_nonzero(table.marks[rows] & EXTENT)) if tier is copies.host else 0
            scattered = int(np.count_nonzero(self._scattered())) if tier is copies.host else 0
            slots = column[rows]
            assert np.unique(slots).size == slots.size, "two blocks share a slot"
            assert (tier.pool.row[slots] == rows).all(), "a slot's row is not its block"
            assert copies.blocks.copies[m.TIER_HOST if tier is copies.host else m.TIER_GPU] == (
                rows.size - extents + scattered
            )
            assert (tier.pool.holds >= 0).all(), "holds went negative"
            for cls in tier.pool.classes:
                mine = np.concatenate([tier.pool.slots_of(slab) for slab in cls.slabs] or [np.empty(0, np.int32)])
                free = mine[cls.free.test(mine)]
                assert free.size == cls.free_count == cls.free.count(), "free slots are counted wrong"
                busy = np.setdiff1d(mine, free)
                assert (tier.pool.row[free] == -1).all(), "a free slot has a row"
                assert (tier.pool.row[busy] != -1).all(), "a slot is neither free nor used"
                assert not tier.pool.holds[free].any(), "a free slot is held"


def reply_of(answer: Answer, kind: type[R]) -> R:
    """The reply, which must be of a kind."""
    assert isinstance(answer.reply, kind), f"{answer.reply} is no {kind.__name__}"
    return answer.reply
