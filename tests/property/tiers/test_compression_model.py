"""A random life of blocks of which some may be compressed: stored, read, cooled down, evicted, reclaimed, restarted.

The model is what was stored. In the namespace that forbids loss every byte that is read is what was stored; in the one
that allows it, that or what FP8 makes of it, as the reply says; and rows, slots and holds always agree.
"""

from __future__ import annotations

import asyncio
import functools

import numpy as np
from hypothesis import settings as examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtierd.core.checksum import fill_and_sum
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import Rig, make_keys, reply_of
from tests.unit.tiers.lossy_blocks import SHAPES, after_fp8, numbers, settings

BLOCKS = 6
PARTS = Geometry(block_size=128, layers=2, kv_heads=2, k_dim=32, v_dim=32)
"""A block that may also lie in parts."""
GEOMETRIES = {**SHAPES, "parts": PARTS}

spaces = st.sampled_from(["lossy", "exact"])
counts = st.integers(1, BLOCKS)


@functools.lru_cache(maxsize=256)
def _lossy(key: bytes, geometry: Geometry) -> bytes:
    return after_fp8(numbers(np.frombuffer(key, np.uint8), geometry), geometry).tobytes()


@functools.lru_cache(maxsize=256)
def _exact(key: bytes, geometry: Geometry) -> bytes:
    return numbers(np.frombuffer(key, np.uint8), geometry).tobytes()


class Compressing(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.leases = []

    def go(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, 30))

    def refusable(self, work):
        try:
            return self.go(work)
        except RequestError as error:
            if error.code != ErrorCode.BUSY or error.retry_after_ms <= 0:
                raise
            return None

    @initialize(disk=st.booleans(), gpu=st.booleans(), shape=st.sampled_from(sorted(GEOMETRIES)), small=st.booleans())
    def begin(self, disk, gpu, shape, small):
        self.geometry = GEOMETRIES[shape]
        self.settings = settings(gpu=gpu, capacity=(3 if small else 8) << 20)
        self.store = MemoryStore() if disk else None
        self.spaces = {name: Namespace(model=name, geometry=self.geometry) for name in ("lossy", "exact")}
        self.keys = {name: make_keys(BLOCKS, namespace=space) for name, space in self.spaces.items()}
        self.go(self.start())

    async def start(self):
        self.rig = Rig(self.settings, self.store)
        await self.rig.__aenter__()
        self.copies = self.rig.manager.copies
        self.session = self.rig.session()
        self.number = {
            name: await self.rig.register(self.session, space, allow_loss=name == "lossy")
            for name, space in self.spaces.items()
        }

    async def stored(self, name, keys):
        grant = await self.rig.reserve(self.session, self.number[name], keys)
        if not grant.id:
            return
        granted = np.flatnonzero(grant.descriptors["status"] == m.SLOT_GRANTED)
        sums = np.zeros((granted.size, self.geometry.layers), np.uint64)
        for i, place in enumerate(granted.tolist()):
            slot = self.rig.slot(grant.descriptors[place], self.geometry)
            fill_and_sum(numbers(keys[place], self.geometry), slot, self.geometry, sums[i])
        await self.rig.commit(self.session, grant, sums)

    @rule(name=spaces, count=counts)
    def put(self, name, count):
        self.refusable(self.stored(name, self.keys[name][:count]))

    @rule(name=spaces, count=counts, keep=st.booleans())
    def read(self, name, count, keep):
        request = m.Acquire(id=1, namespace=self.number[name], ttl_ms=60_000)
        answer = self.refusable(self.rig.call(self.session, request, self.keys[name][:count].tobytes()))
        if answer is None or not answer.reply.lease:
            return
        descriptors = np.frombuffer(answer.frames[0], m.SLOT_DTYPE)
        codecs = answer.reply.codecs or bytes(answer.reply.count)
        assert len(codecs) == answer.reply.count
        self.leases.append((name, answer.reply, descriptors, codecs))
        self.check(*self.leases[-1])
        if not keep:
            self.let_go(len(self.leases) - 1)

    def check(self, name, _reply, descriptors, codecs):
        for key, descriptor, codec in zip(self.keys[name], descriptors, codecs, strict=False):
            assert name == "lossy" or not codec, "a block of a namespace that forbids loss is named as lossy"
            wanted = (_lossy if codec else _exact)(key.tobytes(), self.geometry)
            assert self.rig.read(descriptor, self.geometry).tobytes() == wanted

    @rule(pick=st.integers(0, 99))
    def let_go(self, pick):
        if not self.leases:
            return
        lease = self.leases.pop(pick % len(self.leases))
        self.check(*lease)
        self.go(self.rig.release(self.session, lease[1]))

    @rule(name=spaces)
    def look(self, name):
        request = m.Lookup(id=1, namespaces=[self.number[name]])
        reply = reply_of(self.go(self.rig.call(self.session, request, self.keys[name].tobytes())), m.LookupReply)
        assert len(reply.codecs) in (0, reply.hit)
        assert name == "lossy" or not reply.codecs

    @rule(seconds=st.sampled_from([1, 15, 70]))
    def rest(self, seconds):
        # Not so long that leases end.
        self.rig.clock.advance(seconds if not self.leases else min(seconds, 15))

        async def step() -> None:
            compressor = self.rig.manager._compressor
            for _ in range(3):
                compressor.step()
                if compressor._work is not None:
                    await asyncio.wait([compressor._work])

        self.go(step())

    @rule(count=st.integers(1, 4), pick=st.integers(0, 99))
    def evict(self, count, pick):
        classes = [cls for cls in self.copies.host.pool.classes if cls.used]
        if classes:
            cls = classes[pick % len(classes)]
            self.copies.evict_host(cls, self.copies.host.victims(cls, count))

    @precondition(lambda self: self.store is not None)
    @rule()
    def flush(self):
        self.go(self.rig.call(self.session, m.Flush(id=1)))

    @precondition(lambda self: self.store is not None)
    @rule(pick=st.integers(0, 99))
    def reclaim(self, pick):
        names = sorted(self.store.blocks)
        if names:
            self.store.reclaim(*names[pick % len(names)])

    @precondition(lambda self: self.copies.gpu is not None)
    @rule(name=spaces, count=counts)
    def to_gpu(self, name, count):
        request = m.Prefetch(id=1, namespace=self.number[name], tier="gpu", wait=True)
        self.refusable(self.rig.call(self.session, request, self.keys[name][:count].tobytes()))

    @precondition(lambda self: self.geometry is PARTS)
    @rule(first=st.integers(0, BLOCKS - 2), split=st.booleans(), name=spaces)
    def reshape(self, first, split, name):
        request = m.Reshape(id=1, namespace=self.number[name], parts=[64, 64, 64, 64] if split else [256])
        self.refusable(self.rig.call(self.session, request, self.keys[name][first : first + 2].tobytes()))

    @rule(name=spaces, first=st.integers(0, BLOCKS - 1), count=st.integers(1, 3), rare=st.integers(0, 3))
    def delete(self, name, first, count, rare):
        if rare:
            return
        keys = self.keys[name][first : first + count].tobytes()
        self.go(self.rig.call(self.session, m.Delete(id=1, namespace=self.number[name]), keys))

    @rule(tiers=st.sampled_from([["host"], ["gpu"], ["host", "gpu"]]))
    def purge(self, tiers):
        self.go(self.rig.call(self.session, m.Purge(id=1, tiers=tiers)))

    @precondition(lambda self: self.store is not None)
    @rule()
    def restart(self):
        self.leases.clear()
        self.go(self.rig.__aexit__())
        self.store = MemoryStore(self.store)
        self.go(self.start())

    @rule(rare=st.integers(0, 15))
    def forbid(self, rare):
        """A client that allows no loss comes; later ones cannot allow it again in this life."""
        if rare:
            return

        async def body():
            other = self.rig.session()
            number = await self.rig.register(other, self.spaces["lossy"], allow_loss=False)
            request = m.Lookup(id=1, namespaces=[number])
            answer = await self.rig.call(other, request, self.keys["lossy"].tobytes())
            assert reply_of(answer, m.LookupReply).codecs == b""
            found = await self.rig.call(other, m.Get(id=1, namespace=number), self.keys["lossy"].tobytes())
            assert reply_of(found, m.GetReply).codecs == b""
            for key, frame in zip(self.keys["lossy"], found.frames[1:], strict=False):
                assert bytes(frame) == _exact(key.tobytes(), self.geometry)

        self.refusable(body())

    @invariant()
    def accounts_agree(self):
        if hasattr(self, "rig"):
            self.rig.check_accounts()
            stats = self.rig.manager.stats()
            for name in (
                "host_corrupt_blocks",
                "onboard_corrupt_blocks",
                "gpu_corrupt_blocks",
                "compress_failed_blocks",
            ):
                assert stats[name] == 0, f"{name}: nothing was ever damaged"

    def teardown(self):
        if hasattr(self, "rig"):
            for lease in self.leases:
                self.check(*lease)
            self.go(self.rig.__aexit__())
        self.loop.close()


TestCompressing = Compressing.TestCase
TestCompressing.settings = examples(max_examples=40, stateful_step_count=40, deadline=None)
