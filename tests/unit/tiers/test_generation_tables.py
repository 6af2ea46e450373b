"""Generation tables of the host tier: chunks share them within a class, and a chunk's part is given again."""

from __future__ import annotations

import os

import numpy as np
import pytest

from kvtierd.config.schema import Host
from kvtierd.core.units import MIB
from kvtierd.policy.eviction import LruEviction
from kvtierd.tiers import host_tier
from kvtierd.tiers.arena import Chunk
from kvtierd.tiers.host_tier import HostTier, empty_descriptors


@pytest.fixture
def tier():
    made = HostTier(Host(capacity=16 * MIB, chunk_bytes=MIB), LruEviction(4096))
    while made.missing:
        made.adopt(made.missing.pop(), Chunk(made.new_number(), MIB))
    yield made
    made.close()


def describe(tier, cls, slots):
    out = empty_descriptors(slots.size)
    tier.describe(cls, slots, out)
    return out


def test_chunks_of_a_class_share_a_table_and_no_entry_of_it(tier):
    cls = tier.class_for(MIB // 4, 1, "one")
    chunks = np.unique(describe(tier, cls, tier.take_free(cls, 12))["chunk"]).tolist()
    files = [tier.chunk_files(number, "one") for number in chunks]
    assert len({file.generations_fd for file in files}) == 1
    assert sorted(file.generations_first for file in files) == [0, 4, 8]


def test_tenants_share_no_table(tier):
    one, two = tier.class_for(MIB // 4, 1, "one"), tier.class_for(MIB // 4, 1, "two")
    first, second = (int(describe(tier, cls, tier.take_free(cls, 1))["chunk"][0]) for cls in (one, two))
    assert tier.chunk_files(first, "one").generations_fd != tier.chunk_files(second, "two").generations_fd
    assert tier.chunk_files(second, "one") is None


def test_a_freed_slot_moves_on_in_the_shared_table_and_no_other_does(tier):
    cls = tier.class_for(MIB // 8, 1, "one")
    slots = tier.take_free(cls, 20)
    before = describe(tier, cls, slots)
    tier.release(cls, slots[5:6])
    for number, offset, generation in zip(before["chunk"], before["offset"], before["generation"], strict=True):
        seen = tier.shared_generations(int(number))[int(offset) // cls.slot_bytes]
        assert seen == generation + (offset == before["offset"][5] and number == before["chunk"][5])


def test_the_next_chunk_in_a_part_goes_on_from_the_generations_there(tier):
    cls = tier.class_for(MIB, 1, "one")
    kept, gone = tier.take_free(cls, 2)[:, None]
    before = describe(tier, cls, gone)
    old = tier.chunk_files(int(before["chunk"][0]), "one")
    tier.release(cls, gone)
    slab = int(tier.pool.slabs_of(gone)[0])
    tier.pool.remove_slab(slab)
    tier.drop(slab).close()
    tier.adopt(tier.missing.pop(), Chunk(tier.new_number(), MIB))
    after = describe(tier, cls, tier.take_free(cls, 1))
    new = tier.chunk_files(int(after["chunk"][0]), "one")
    assert new.chunk != old.chunk
    assert new.generations_first == old.generations_first
    assert after["generation"][0] > before["generation"][0]
    assert describe(tier, cls, kept)["generation"][0] == 1


def test_a_table_without_chunks_is_closed(tier):
    cls = tier.class_for(MIB // 2, 1, "one")
    slots = tier.take_free(cls, 1)
    table = tier.chunk_files(int(describe(tier, cls, slots)["chunk"][0]), "one").generations_fd
    tier.release(cls, slots)
    slab = int(tier.pool.slabs_of(slots)[0])
    tier.pool.remove_slab(slab)
    tier.drop(slab).close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(table)
    assert tier.take_free(cls, 2).size == 2


def test_without_a_table_there_are_no_slots_and_nothing_is_lost(tier, monkeypatch):
    def fails(_slots):
        raise OSError(24, "Too many open files")

    cls = tier.class_for(MIB // 2, 1, "one")
    spare = len(tier.spare)
    with monkeypatch.context() as patch:
        patch.setattr(host_tier, "GenerationTable", fails)
        assert tier.take_free(cls, 3).size == 0
        assert len(tier.spare) == spare
    assert tier.take_free(cls, 3).size == 3
