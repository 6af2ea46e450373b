"""A random life of blocks in extents of changing sizes: split, merged, read in parts, leased, evicted, deleted, stored.

The model is the set of blocks that may be there and what their bytes must be. Whatever happens, what a lease says is
right byte for byte until it ends, what is asked for is a miss or right, and rows, slots and holds agree.
"""

from __future__ import annotations

import asyncio
import functools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.parts import Stored, read_part, right
from kvtierd.testing.rig import pattern, reply_of

BLOCKS, TOKENS = 6, 256
CUTS = ([256], [64, 192], [128, 128], [192, 64], [64, 64, 128], [64] * 4)

blocks = st.integers(0, BLOCKS - 1)
shapes = st.lists(st.sampled_from([*CUTS, [512]]), min_size=1, max_size=4)


class ShapeLife(RuleBasedStateMachine):
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

    @initialize(disk=st.booleans(), layout=st.sampled_from(["nhd", "hnd"]))
    def begin(self, disk, layout):
        self.disk = disk
        self.stored = Stored(blocks=BLOCKS, layout=layout, tokens=TOKENS, store=MemoryStore() if disk else None)
        self.go(self.stored.__aenter__())
        self.rig, self.copies = self.stored.rig, self.stored.rig.manager.copies
        self.keys, self.shape = self.stored.keys, self.stored.shape
        self.wanted = right(self.keys, self.shape)

    @rule(first=blocks, cuts=shapes)
    def reshape(self, first, cuts):
        parts = [tokens for cut in cuts for tokens in cut]
        while sum(parts) > (BLOCKS - first) * TOKENS:
            parts = parts[:-1]
        count = sum(parts) // TOKENS
        if not parts or sum(parts) % TOKENS:
            return
        done = self.refusable(self.stored.reshape(parts, self.keys[first : first + count]))
        assert done in (None, 0, count)

    @rule(begin=st.integers(0, BLOCKS * TOKENS - 1), length=st.integers(1, 700), keep=st.booleans())
    def read(self, begin, length, keep):
        end = min(begin + length, BLOCKS * TOKENS)
        found = self.refusable(self.stored.part(begin=begin, end=end))
        if found is None or not found[0].lease:
            return
        self.leases.append(functools.partial(self.check_part, found))
        self.leases[-1]()
        if not keep:
            self.let_go(len(self.leases) - 1)

    @rule(count=st.integers(1, BLOCKS), keep=st.booleans())
    def acquire(self, count, keep):
        work = self.rig.acquire(self.stored.session, self.stored.number, self.keys[:count])
        found = self.refusable(work)
        if found is None or not found[0].lease:
            return
        self.leases.append(functools.partial(self.check_whole, found))
        if not keep:
            self.let_go(len(self.leases) - 1)

    def check_part(self, found):
        got, at = read_part(self.rig, self.shape, found)
        assert (got == self.wanted[:, at : at + got.shape[1]]).all()
        return found[0]

    def check_whole(self, found):
        for key, descriptor in zip(self.keys, found[1], strict=False):
            assert (self.rig.read(descriptor, self.shape) == pattern(key, self.shape)).all()
        return found[0]

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 99))
    def let_go(self, pick):
        reply = self.leases.pop(pick % len(self.leases))()
        self.go(self.rig.release(self.stored.session, reply))

    @rule(count=st.integers(1, 4), pick=st.integers(0, 99))
    def evict(self, count, pick):
        classes = [cls for cls in self.copies.host.pool.classes if cls.used]
        if classes:
            cls = classes[pick % len(classes)]
            self.copies.evict_host(cls, self.copies.host.victims(cls, count))

    @rule(first=blocks, count=st.integers(1, 3))
    def delete(self, first, count):
        keys = self.keys[first : first + count].tobytes()
        self.go(self.rig.call(self.stored.session, m.Delete(id=1, namespace=self.stored.number), keys))

    @rule()
    def store_again(self):
        self.refusable(self.rig.store(self.stored.session, self.stored.number, self.keys, self.shape))

    @rule(tiers=st.sampled_from([["host"], ["gpu"], ["host", "gpu"]]))
    def purge(self, tiers):
        self.go(self.rig.call(self.stored.session, m.Purge(id=1, namespace=self.stored.number, tiers=tiers)))

    @rule(count=st.integers(1, BLOCKS))
    def raise_to_gpu(self, count):
        request = m.Prefetch(id=1, namespace=self.stored.number, tier="gpu", wait=True)
        self.refusable(self.rig.call(self.stored.session, request, self.keys[:count].tobytes()))

    @precondition(lambda self: self.disk)
    @rule()
    def flush(self):
        self.go(self.rig.call(self.stored.session, m.Flush(id=1)))

    @rule(first=blocks)
    def pin_and_unpin(self, first):
        key = self.keys[first : first + 1].tobytes()
        request = m.Pin(id=1, namespace=self.stored.number)
        answer = self.refusable(self.rig.call(self.stored.session, request, key))
        if answer is not None and reply_of(answer, m.CountReply).count:
            assert self.refusable(self.stored.reshape([64, 192], self.keys[first : first + 1])) in (None, 0)
            self.go(self.rig.call(self.stored.session, m.Unpin(id=1, namespace=self.stored.number), key))

    @rule(seconds=st.sampled_from([0.1, 70.0]))
    def time_passes(self, seconds):
        for lease in self.leases:
            self.go(self.rig.release(self.stored.session, lease()))
        self.leases = []
        self.rig.clock.advance(seconds)
        self.go(asyncio.sleep(0.11))

    @invariant()
    def accounts_agree(self):
        self.rig.check_accounts()
        for lease in self.leases:
            lease()

    def teardown(self):
        self.go(self.rig.manager.close())
        self.loop.close()


ShapeLife.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestShapeLife = ShapeLife.TestCase
