"""A random life of many clients against the real manager: aborts, deaths, expiries and deletes at every step.

The model knows what was committed and what is leased. Whatever happens: nothing uncommitted is visible, what is found
has the right bytes, what is leased stays, and slots, rows and holds agree (CASES 2, 5, 15, 18).
"""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.protocol import messages as m
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.testing.rig import Rig, make_keys, pattern

SHAPE = Geometry(block_size=128, layers=2, kv_heads=4, k_dim=64, v_dim=0)  # 128 KiB a slot: 16 slots in host
SPACE = Namespace(model="model", geometry=SHAPE)
PROMPTS = [make_keys(6, start=start, namespace=SPACE) for start in range(4)]

clients = st.integers(0, 2)
prompts = st.integers(0, len(PROMPTS) - 1)
lengths = st.integers(1, 6)


class BlockLife(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.committed: set[bytes] = set()
        self.grants: list[tuple[int, int, object, np.ndarray]] = []
        self.leases: dict[int, tuple[int, int, np.ndarray, np.ndarray]] = {}

    def go(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, 30))

    @initialize()
    def begin(self):
        self.store = MemoryStore()
        self.rig = Rig(store=self.store)
        self.go(self.rig.__aenter__())
        self.sessions = [None, None, None]
        self.spaces = [0, 0, 0]
        for client in range(3):
            self.connect(client)

    def connect(self, client):
        self.sessions[client] = self.rig.session()
        self.spaces[client] = self.go(self.rig.register(self.sessions[client], SPACE))

    def refusable(self, work):
        """Run; None when the daemon had no room."""
        try:
            return self.go(work)
        except RequestError as error:
            if error.code != ErrorCode.BUSY or error.retry_after_ms <= 0:
                raise
            return None

    # Stores and reads are offered twice, or most random lives would be about blocks that are not there.
    @rule(client=clients, prompt=prompts, length=lengths)
    def store_one(self, client, prompt, length):
        self.reserve(client, prompt, length)
        if self.grants and self.grants[-1][0] == client:
            self.commit(len(self.grants) - 1, verify=False, half=False)

    @rule(client=clients, prompt=prompts)
    def store_whole(self, client, prompt):
        self.store_one(client, prompt, 6)

    @rule(client=clients, prompt=prompts)
    def acquire_whole(self, client, prompt):
        self.acquire(client, prompt, 6, verify=False)

    @rule(client=clients, prompt=prompts, length=lengths)
    def reserve(self, client, prompt, length):
        keys = PROMPTS[prompt][:length]
        grant = self.refusable(self.rig.reserve(self.sessions[client], self.spaces[client], keys))
        if grant is not None and grant.id:
            self.grants.append((client, grant.id, grant, keys))

    @precondition(lambda self: self.grants)
    @rule(pick=st.integers(0, 99), verify=st.booleans(), half=st.booleans())
    def commit(self, pick, verify, half):
        at = pick % len(self.grants)
        client, _, grant, keys = self.grants[at]
        sums = self.rig.fill(grant, keys, SHAPE)
        granted = np.flatnonzero(grant.descriptors["status"] == m.SLOT_GRANTED)
        if half and granted.size > 1:
            part = granted[: granted.size // 2]
            self.go(
                self.rig.commit(self.sessions[client], grant, sums[: part.size], index=part.tolist(), verify=verify)
            )
            self.committed |= {keys[i].tobytes() for i in part}
            self.go(self.rig.call(self.sessions[client], m.Abort(id=1, reservation=grant.id)))
        else:
            self.go(self.rig.commit(self.sessions[client], grant, sums, verify=verify))
            self.committed |= {keys[i].tobytes() for i in granted}
        del self.grants[at]

    @precondition(lambda self: self.grants)
    @rule(pick=st.integers(0, 99))
    def abort(self, pick):
        client, number, _, _ = self.grants.pop(pick % len(self.grants))
        self.go(self.rig.call(self.sessions[client], m.Abort(id=1, reservation=number)))

    @rule(client=clients, prompt=prompts, length=lengths, verify=st.booleans())
    def acquire(self, client, prompt, length, verify):
        keys = PROMPTS[prompt][:length]
        found = self.refusable(self.rig.acquire(self.sessions[client], self.spaces[client], keys, verify=verify))
        if found is None:
            return
        reply, descriptors = found
        assert all(key.tobytes() in self.committed for key in keys[: reply.count])
        if reply.lease:
            self.leases[reply.lease] = (client, self.rig.clock.now_ns() + 1_000_000_000, descriptors, keys)

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 99))
    def release(self, pick):
        number = sorted(self.leases)[pick % len(self.leases)]
        client = self.leases.pop(number)[0]
        self.go(self.rig.call(self.sessions[client], m.Release(id=1, leases=[number])))

    @rule(client=clients, prompt=prompts)
    def cancelled_acquire(self, client, prompt):
        async def begin_and_cancel():
            work = asyncio.ensure_future(
                self.rig.acquire(self.sessions[client], self.spaces[client], PROMPTS[prompt], verify=True)
            )
            await asyncio.sleep(0)
            work.cancel()
            return (await asyncio.gather(work, return_exceptions=True))[0]

        outcome = self.go(begin_and_cancel())
        if isinstance(outcome, tuple) and outcome[0].lease:
            self.go(self.rig.release(self.sessions[client], outcome[0]))

    @rule(seconds=st.sampled_from([0.3, 0.8, 2.0]))
    def time_passes(self, seconds):
        self.rig.clock.advance(seconds)
        now = self.rig.clock.now_ns()
        self.leases = {n: lease for n, lease in self.leases.items() if lease[1] > now}
        self.go(asyncio.sleep(0.06))

    @rule(client=clients, silent_first=st.booleans())
    def client_dies(self, client, silent_first):
        if silent_first:
            self.rig.manager.session_detached(self.sessions[client])
        self.rig.manager.process_gone(self.sessions[client])
        self.leases = {n: lease for n, lease in self.leases.items() if lease[0] != client}
        self.grants = [grant for grant in self.grants if grant[0] != client]
        self.connect(client)

    @rule(client=clients, prompt=prompts, start=st.integers(2, 5))
    def delete(self, client, prompt, start):
        keys = PROMPTS[prompt][start:]
        self.go(self.rig.call(self.sessions[client], m.Delete(id=1, namespace=self.spaces[client]), keys.tobytes()))
        for key in keys:
            assert self.go(self.rig.lookup(self.sessions[0], self.spaces[0], key.reshape(1, 32))) == 0
        pending = {k.tobytes() for grant in self.grants for k in grant[3]}
        self.committed -= {key.tobytes() for key in keys} - pending

    @rule(client=clients, prompt=prompts, pin=st.booleans())
    def pin_or_unpin(self, client, prompt, pin):
        kind = m.Pin if pin else m.Unpin
        request = kind(id=1, namespace=self.spaces[client])
        try:
            self.go(self.rig.call(self.sessions[client], request, PROMPTS[prompt][:2].tobytes()))
        except RequestError as error:
            if error.code not in {ErrorCode.BUSY, ErrorCode.TOO_LARGE}:
                raise

    @rule()
    def flush(self):
        self.go(self.rig.call(self.sessions[0], m.Flush(id=1)))

    @rule(tiers=st.sampled_from([["host"], ["gpu"], ["gpu", "host"]]))
    def purge(self, tiers):
        self.go(self.rig.call(self.sessions[0], m.Purge(id=1, tiers=tiers)))

    @rule(prompt=prompts, wait=st.booleans())
    def raise_to_gpu(self, prompt, wait):
        request = m.Prefetch(id=1, namespace=self.spaces[0], tier="gpu", wait=wait)
        self.refusable(self.rig.call(self.sessions[0], request, PROMPTS[prompt].tobytes()))

    @rule(fails=st.integers(1, 3), reads=st.booleans())
    def disk_fails(self, fails, reads):
        if reads:
            self.store.fail_reads = fails
        else:
            self.store.fail_writes = fails

    @invariant()
    def accounts_agree(self):
        if hasattr(self, "rig"):
            self.rig.check_accounts()
            assert self.rig.manager.stats()["leases"] == len(self.leases)

    @invariant()
    def leased_bytes_are_right(self):
        for _, _, descriptors, keys in self.leases.values():
            for key, descriptor in zip(keys, descriptors, strict=False):
                assert self.rig.generation(descriptor, SHAPE) == int(descriptor["generation"])
                assert (self.rig.read(descriptor, SHAPE)[:64] == pattern(key, SHAPE)[:64]).all()

    async def let_moves_end(self):
        """Moves that nobody waits for any more end by themselves; how soon depends on the machine."""
        holds = self.rig.manager.copies.host.pool.holds
        for _ in range(1000):
            if not holds.any():
                return
            await asyncio.sleep(0.01)

    def teardown(self):
        if hasattr(self, "rig"):
            for client in range(3):
                self.rig.manager.process_gone(self.sessions[client])
            self.go(self.rig.call(self.rig.session(), m.Flush(id=1)))
            self.go(self.let_moves_end())
            assert not self.rig.manager.copies.host.pool.holds.any(), "something is held for nobody"
            self.go(self.rig.__aexit__())
        self.loop.close()


BlockLife.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestBlockLife = BlockLife.TestCase
