"""Blocks through a client, by arena and by frames: the same results."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvtierd.core.checksum import layer_sums
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.namespace import Namespace
from kvtierd.protocol.client import Client
from kvtierd.protocol.messages import SLOT_BUSY, SLOT_EXISTS, SLOT_GRANTED, TIER_HOST
from kvtierd.testing.fake_daemon import ThreadDaemon
from tests.unit.protocol.conftest import PADDED, blocks_of, keys_of


def test_stored_blocks_come_back_byte_for_byte(client: Client, namespace: Namespace) -> None:
    handle = client.register(namespace)
    keys, blocks = keys_of(namespace, 5), blocks_of(namespace, 5)
    assert client.lookup(handle, keys).count == 0
    stored = client.store(handle, keys, blocks)
    assert (stored.stored, stored.existed, stored.dropped) == (5, 0, 0)
    hit = client.lookup(handle, keys)
    assert hit.count == 5
    assert hit.tiers.tolist() == [TIER_HOST] * 5
    found = client.fetch(handle, keys)
    assert found.count == 5
    assert found.sources.tolist() == [TIER_HOST] * 5
    np.testing.assert_array_equal(found.blocks, blocks)


def test_large_blocks_are_copied_by_several_threads(client: Client, namespace: Namespace) -> None:
    handle = client.register(namespace)
    count = 60
    keys, blocks = keys_of(namespace, count), blocks_of(namespace, count)
    assert client.store(handle, keys, list(blocks)).stored == count
    out = np.zeros((count + 2, namespace.geometry.block_bytes), np.uint8)
    found = client.fetch(handle, keys, out)
    assert np.shares_memory(found.blocks, out)
    np.testing.assert_array_equal(out[:count], blocks)
    assert not out[count:].any()


def test_fetch_stops_at_the_first_missing_block(client: Client, namespace: Namespace) -> None:
    handle = client.register(namespace)
    keys, blocks = keys_of(namespace, 4), blocks_of(namespace, 4)
    client.store(handle, keys[:2], blocks[:2])
    client.store(handle, keys[3:], blocks[3:])
    assert client.lookup(handle, keys).count == 2
    found = client.fetch(handle, keys)
    assert found.count == 2
    np.testing.assert_array_equal(found.blocks, blocks[:2])


def test_storing_twice_changes_nothing(client: Client, namespace: Namespace) -> None:
    handle = client.register(namespace)
    keys, blocks = keys_of(namespace, 3), blocks_of(namespace, 3)
    client.store(handle, keys[:1], blocks[:1])
    again = client.store(handle, keys, blocks_of(namespace, 3, seed=1))
    assert (again.stored, again.existed, again.dropped) == (2, 1, 0)
    np.testing.assert_array_equal(client.fetch(handle, keys[:1]).blocks, blocks[:1])


def test_blocks_without_room_are_dropped_and_counted(client: Client, namespace: Namespace) -> None:
    handle = client.register(namespace)
    keys, blocks = keys_of(namespace, 70), blocks_of(namespace, 70)
    stored = client.store(handle, keys, blocks)
    assert (stored.stored, stored.dropped) == (64, 6)
    assert client.counters["blocks_dropped"] == 6
    assert client.lookup(handle, keys).count == 64


def test_deleted_and_purged_blocks_are_gone(client: Client, namespace: Namespace) -> None:
    handle = client.register(namespace)
    keys, blocks = keys_of(namespace, 4), blocks_of(namespace, 4)
    client.store(handle, keys, blocks)
    assert client.delete(handle, keys[2:]) == 2
    assert client.lookup(handle, keys).count == 2
    assert client.purge(handle) == 2
    assert client.purge() == 0
    assert client.lookup(handle, keys).count == 0


def test_counts_and_quiet_operations(client: Client, namespace: Namespace) -> None:
    handle = client.register(namespace)
    keys = keys_of(namespace, 3)
    client.store(handle, keys, blocks_of(namespace, 3))
    assert client.prefetch(handle, keys) == 3
    assert client.prefetch(handle, keys, tier="gpu", wait=True) == 3
    assert client.pin(handle, keys) == client.unpin(handle, keys) == 3
    client.flush()
    assert client.stats()["blocks"] == 3
    assert client.ping() > 0


def test_lookup_over_namespaces_answers_their_common_prefix(client: Client) -> None:
    ranks = [Namespace(model="m", geometry=PADDED, tp_rank=rank, tp_size=2) for rank in (0, 1)]
    handles = [client.register(rank) for rank in ranks]
    keys = [keys_of(rank, 4) for rank in ranks]
    client.store(handles[0], keys[0], blocks_of(ranks[0], 4))
    client.store(handles[1], keys[1][:3], blocks_of(ranks[1], 3))
    assert client.lookup_group(handles, keys).count == 3
    assert client.lookup_many(handles[0], [keys[0], keys[1], keys[0][:2]])[0].count == 4
    with pytest.raises(ValueError, match="one array of keys for each namespace"):
        client.lookup_group(handles, [keys[0], keys[1][:1]])


def test_many_lookups_are_answered_in_their_order(client: Client, namespace: Namespace) -> None:
    handle = client.register(namespace)
    keys = keys_of(namespace, 8)
    client.store(handle, keys, blocks_of(namespace, 8))
    lengths = [i % 9 for i in range(1000)]
    hits = client.lookup_many(handle, [keys[:n] for n in lengths])
    assert [hit.count for hit in hits] == lengths


def test_a_lookup_over_the_batch_limit_is_asked_in_pieces(
    client: Client, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = client.register(namespace)
    keys = keys_of(namespace, 10)
    client.store(handle, keys, blocks_of(namespace, 10))
    monkeypatch.setattr(client._connection, "max_batch", 4)
    assert client.lookup(handle, keys).count == 10
    assert client.delete(handle, keys[9:]) == 1
    hit = client.lookup(handle, keys)
    assert hit.count == len(hit.tiers) == 9
    assert client.fetch(handle, keys).count == 9
    with pytest.raises(ValueError, match="10 keys is over the limit of 4"):
        client.lookup_many(handle, [keys])


@pytest.mark.parametrize(
    ("keys", "message"),
    [(np.zeros((2, 31), np.uint8), "62 bytes"), (np.zeros(4, np.uint32), "uint32")],
    ids=["length", "dtype"],
)
def test_keys_that_are_none_are_the_callers_mistake(client: Client, keys: np.ndarray, message: str) -> None:
    handle = client.register(Namespace(model="m", geometry=PADDED))
    with pytest.raises(ValueError, match=message):
        client.lookup(handle, keys)
    assert client.ping() > 0


def test_blocks_that_do_not_fit_their_namespace_are_the_callers_mistake(client: Client) -> None:
    namespace = Namespace(model="m", geometry=PADDED)
    handle = client.register(namespace)
    keys, blocks = keys_of(namespace, 2), blocks_of(namespace, 2)
    with pytest.raises(ValueError, match="2 keys came with 1 blocks"):
        client.store(handle, keys, blocks[:1])
    with pytest.raises(ValueError, match="block 0 has 1151 bytes"):
        client.store(handle, keys, blocks[:, 1:])
    for out in (np.zeros((1, 1152), np.uint8), np.zeros((2, 1152), np.int8), np.zeros((2, 2304), np.uint8)[:, ::2]):
        with pytest.raises(ValueError, match="out"):
            client.fetch(handle, keys, out)


def test_a_namespace_that_the_daemon_refuses_is_an_error(client: Client) -> None:
    large = Namespace(model="m", geometry=msgspec_replace(PADDED, block_size=4096))
    with pytest.raises(RequestError, match="does not fit in a slot") as caught:
        client.register(large)
    assert caught.value.code == ErrorCode.TOO_LARGE


def msgspec_replace(geometry: object, **changes: object) -> object:
    import msgspec

    return msgspec.structs.replace(geometry, **changes)  # type: ignore[type-var]


def test_a_reservation_becomes_visible_with_commit(connect: Callable[..., Client], namespace: Namespace) -> None:
    client = connect()
    handle = client.register(namespace)
    keys, blocks = keys_of(namespace, 3), blocks_of(namespace, 3)
    client.store(handle, keys[1:2], blocks[1:2])
    with client.reserve(handle, keys) as reservation:
        assert reservation.status.tolist() == [SLOT_GRANTED, SLOT_EXISTS, SLOT_GRANTED]
        assert reservation.views[1] is None
        write(reservation.views[0], blocks[0], namespace)
        write(reservation.views[2], blocks[2], namespace)
        assert client.lookup(handle, keys).count == 0
        assert reservation.commit([0], verify=True) == 1
        assert client.lookup(handle, keys).count == 2
        with pytest.raises(ValueError, match="block 0 of the reservation"):
            reservation.commit([0])
        assert reservation.commit() == 1
    found = client.fetch(handle, keys)
    np.testing.assert_array_equal(found.blocks, blocks)


def test_a_reservation_left_without_commit_leaves_nothing(
    connect: Callable[..., Client], namespace: Namespace, daemon: ThreadDaemon
) -> None:
    client = connect()
    handle = client.register(namespace)
    keys = keys_of(namespace, 3)
    with client.reserve(handle, keys) as reservation:
        assert client.stats()["slots_free"] == 61
    assert client.stats()["slots_free"] == 64
    assert reservation.views == [None] * 3
    assert client.lookup(handle, keys).count == 0
    with pytest.raises(ValueError, match="block 1"):
        reservation.commit([1])
    assert not daemon.service.reservations


def test_a_commit_with_wrong_sums_is_refused(connect: Callable[..., Client], namespace: Namespace) -> None:
    client = connect()
    handle = client.register(namespace)
    keys = keys_of(namespace, 1)
    with client.reserve(handle, keys) as reservation:
        sums = np.zeros((1, namespace.geometry.layers), np.uint64)
        with pytest.raises(RequestError, match="does not match its sums") as caught:
            reservation.commit(sums=sums, verify=True)
        assert caught.value.code == ErrorCode.CHECKSUM_MISMATCH
        with pytest.raises(ValueError, match="sums have shape"):
            reservation.commit(sums=sums[:, :1])
    assert client.lookup(handle, keys).count == 0


def test_a_commit_that_is_not_waited_for_is_seen_by_later_calls(
    connect: Callable[..., Client], namespace: Namespace
) -> None:
    client = connect()
    handle = client.register(namespace)
    keys, blocks = keys_of(namespace, 3), blocks_of(namespace, 3)
    with client.reserve(handle, keys) as reservation:
        for view, block in zip(reservation.views, blocks, strict=True):
            write(view, block, namespace)
        assert reservation.commit([0, 1], wait=False) == 2
        assert reservation.commit(wait=False) == 1
        assert reservation.views == [None] * 3
    np.testing.assert_array_equal(client.fetch(handle, keys).blocks, blocks)
    assert client.counters["stores_dropped_refused"] == 0


def test_what_the_daemon_refuses_of_a_commit_nobody_waits_for_is_counted(
    connect: Callable[..., Client], namespace: Namespace
) -> None:
    client = connect()
    handle = client.register(namespace)
    keys = keys_of(namespace, 1)
    with client.reserve(handle, keys) as reservation:
        sums = np.zeros((1, namespace.geometry.layers), np.uint64)
        assert reservation.commit(sums=sums, verify=True, wait=False) == 1
    assert client.lookup(handle, keys).count == 0
    client.ping()
    assert client.counters["stores_dropped_refused"] == 1


def test_a_lease_gives_read_only_views_that_can_be_trusted(
    connect: Callable[..., Client], namespace: Namespace
) -> None:
    client = connect()
    handle = client.register(namespace)
    keys, blocks = keys_of(namespace, 3), blocks_of(namespace, 3)
    client.store(handle, keys, blocks)
    with client.acquire(handle, keys, ttl_s=5) as lease:
        assert lease.count == 3
        assert lease.sources.tolist() == [TIER_HOST] * 3
        for view, sums in zip(lease.views, lease.sums, strict=True):
            np.testing.assert_array_equal(layer_sums(view, namespace.geometry), sums)
            with pytest.raises(ValueError, match="read-only"):
                view[0] = 1
        out = np.empty((3, namespace.geometry.block_bytes), np.uint8)
        assert lease.copy_to(out, verify=False) == 3
        np.testing.assert_array_equal(out, blocks)
        assert lease.unchanged() == 3
    lease.release()


def test_a_slot_that_changed_hands_is_a_miss(
    connect: Callable[..., Client], namespace: Namespace, daemon: ThreadDaemon
) -> None:
    client = connect()
    handle = client.register(namespace)
    keys, blocks = keys_of(namespace, 3), blocks_of(namespace, 3)
    client.store(handle, keys, blocks)
    out = np.empty((3, namespace.geometry.block_bytes), np.uint8)
    with client.acquire(handle, keys) as lease:
        block = daemon.service.blocks[handle.digest, keys[1].tobytes()]
        daemon.service.chunk.generations[block.slot] += 1
        assert lease.unchanged() == 1
        assert lease.copy_to(out, verify=False) == 1
        assert lease.copy_to(out) == 1


def test_bytes_that_do_not_match_their_sums_are_a_miss(
    client: Client, namespace: Namespace, daemon: ThreadDaemon
) -> None:
    handle = client.register(namespace)
    keys, blocks = keys_of(namespace, 3), blocks_of(namespace, 3)
    client.store(handle, keys, blocks)
    block = daemon.service.blocks[handle.digest, keys[2].tobytes()]
    daemon.service.chunk.slot(block.slot)[5] ^= 1
    found = client.fetch(handle, keys)
    assert found.count == 2 == len(found.blocks) == len(found.sources)
    assert client.counters["blocks_mismatched"] == 1
    assert client.fetch(handle, keys, verify=False).count == 3


def test_nothing_is_held_after_fetching(client: Client, namespace: Namespace, daemon: ThreadDaemon) -> None:
    handle = client.register(namespace)
    keys = keys_of(namespace, 3)
    client.store(handle, keys, blocks_of(namespace, 3))
    client.fetch(handle, keys)
    client.ping()
    assert not daemon.call(lambda: daemon.service.leases)


def test_without_an_arena_reserving_is_refused_and_acquiring_finds_nothing(
    connect: Callable[..., Client], namespace: Namespace
) -> None:
    client = connect(arena=False)
    handle = client.register(namespace)
    keys = keys_of(namespace, 2)
    client.store(handle, keys, blocks_of(namespace, 2))
    with client.reserve(handle, keys) as reservation, client.acquire(handle, keys) as lease:
        assert reservation.status.tolist() == [SLOT_BUSY, SLOT_BUSY]
        assert lease.count == 0


def write(view: np.ndarray | None, block: np.ndarray, namespace: Namespace) -> None:
    """Write a packed block in slot form."""
    assert view is not None
    shape = namespace.geometry
    view[:] = 0
    parts = view.reshape(shape.layers, shape.layer_stride)
    parts[:, : shape.layer_bytes] = block.reshape(shape.layers, shape.layer_bytes)
