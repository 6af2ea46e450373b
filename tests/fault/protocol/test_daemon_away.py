"""A daemon that is absent, frozen, killed or new: calls end, lookups miss, and it is found again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from kvtierd.core.errors import ErrorCode
from kvtierd.protocol.client import Client
from kvtierd.protocol.connection import Unavailable
from kvtierd.protocol.messages import SLOT_BUSY, ErrorReply, Lookup, NamespaceReply, RegisterNamespace, Stats
from kvtierd.testing.fake_daemon import ProcessDaemon
from kvtierd.testing.raw_client import RawClient
from tests.fault.protocol.conftest import SPACE, blocks_of, keys_of, until

KEYS, BLOCKS = keys_of(3), blocks_of(3)


def check_that_nothing_is_found(client: Client) -> None:
    """Every operation with a daemon that does not answer."""
    handle = client.register(SPACE)
    assert client.lookup(handle, KEYS).count == 0
    assert client.lookup_group([handle], [KEYS]).count == 0
    assert [hit.count for hit in client.lookup_many(handle, [KEYS, KEYS])] == [0, 0]
    stored = client.store(handle, KEYS, BLOCKS)
    assert (stored.stored, stored.existed, stored.dropped) == (0, 0, 3)
    assert client.fetch(handle, KEYS).count == 0
    with client.acquire(handle, KEYS) as lease, client.reserve(handle, KEYS) as reservation:
        assert lease.count == 0
        assert lease.copy_to(np.empty((0, SPACE.geometry.block_bytes), np.uint8)) == 0
        assert reservation.status.tolist() == [SLOT_BUSY] * 3
        assert reservation.commit() == 0
    assert client.pin(handle, KEYS) == client.prefetch(handle, KEYS) == client.delete(handle, KEYS) == 0
    for call in (client.ping, client.flush, client.purge, client.stats):
        with pytest.raises(Unavailable, match="no daemon at ipc:"):
            call()
    assert client.counters["lookups_missed_unavailable"] >= 6
    assert client.counters["blocks_dropped"] == 3


def test_without_a_daemon_lookups_miss_and_stores_are_dropped(client: Client) -> None:
    check_that_nothing_is_found(client)


def test_a_handle_made_without_a_daemon_works_when_it_comes(client: Client, start: Callable[[], ProcessDaemon]) -> None:
    handle = client.register(SPACE)
    assert client.lookup(handle, KEYS).count == 0
    start()
    until(lambda: client.store(handle, KEYS, BLOCKS).stored == 3 or client.lookup(handle, KEYS).count == 3)
    np.testing.assert_array_equal(client.fetch(handle, KEYS).blocks, BLOCKS)


def test_a_frozen_daemon_is_a_miss_until_it_wakes(client: Client, start: Callable[[], ProcessDaemon]) -> None:
    daemon = start()
    handle = client.register(SPACE)
    client.ping(timeout_s=20)
    until(lambda: client.store(handle, KEYS, BLOCKS).dropped == 0)
    client.counters.clear()
    daemon.freeze()
    check_that_nothing_is_found(client)
    assert client.counters["sessions_lost"] >= 1
    daemon.wake()
    until(lambda: client.lookup(handle, KEYS).count == 3)
    np.testing.assert_array_equal(client.fetch(handle, KEYS, timeout_s=20).blocks, BLOCKS)


def test_a_daemon_frozen_before_the_first_call_is_a_miss(client: Client, start: Callable[[], ProcessDaemon]) -> None:
    daemon = start()
    daemon.freeze()
    check_that_nothing_is_found(client)
    daemon.wake()
    assert client.ping(timeout_s=20) > 0


def test_a_frozen_daemon_serves_nothing_that_was_given_up(endpoint: str, start: Callable[[], ProcessDaemon]) -> None:
    daemon = start()
    with Client(endpoint, timeout_s=0.3, transfer_timeout_s=0.3) as client:
        handle = client.register(SPACE)
        client.ping(timeout_s=20)
        until(lambda: client.store(handle, KEYS, BLOCKS).dropped == 0)
        before = client.stats(timeout_s=20)
        daemon.freeze()
        client.reserve(handle, keys_of(2, first_token=900))
        client.acquire(handle, KEYS)
        daemon.wake()
        assert client.stats(timeout_s=20) == before


def test_case_17_a_killed_daemon_is_used_again_when_it_is_back(
    client: Client, start: Callable[[], ProcessDaemon]
) -> None:
    epochs = set()
    for round_ in range(3):
        daemon = start()
        handle = client.register(SPACE)
        until(lambda handle=handle, seed=round_: client.store(handle, KEYS, blocks_of(3, seed)).stored == 3)
        np.testing.assert_array_equal(client.fetch(handle, KEYS, timeout_s=20).blocks, blocks_of(3, round_))
        epochs.add(client._connection.epoch)
        daemon.kill()
        client.counters.clear()
        check_that_nothing_is_found(client)
    assert len(epochs) == 3


def test_a_restart_between_two_calls_is_not_even_a_miss(client: Client, start: Callable[[], ProcessDaemon]) -> None:
    first = start()
    handle = client.register(SPACE)
    client.ping(timeout_s=20)
    first.stop()
    start()
    until(lambda: client._connection._socket.poll(100, 2))  # type: ignore[union-attr] # ZeroMQ has connected again
    assert client.store(handle, KEYS, BLOCKS, timeout_s=20).stored == 3
    assert client.lookup(handle, KEYS, timeout_s=20).count == 3
    assert client.counters["lookups_missed_unavailable"] == 0


def test_what_a_reservation_of_an_earlier_life_commits_is_dropped(
    endpoint: str, start: Callable[[], ProcessDaemon]
) -> None:
    first = start()
    with Client(endpoint, timeout_s=20, transfer_timeout_s=20) as client:
        handle = client.register(SPACE)
        reservation = client.reserve(handle, KEYS)
        lease = client.acquire(handle, KEYS)
        assert reservation.views[0] is not None
        first.stop()
        start()
        client.ping()
        assert client.lookup(handle, KEYS).count == 0
        reservation.views[0][:] = 1  # the mapping of the earlier life is still ours
        assert reservation.commit() == 0
        reservation.abort()
        lease.release()
        assert client.stats()["slots_free"] == 64
        assert client.store(handle, KEYS, BLOCKS).stored == 3


def test_messages_of_an_earlier_epoch_change_nothing(endpoint: str, start: Callable[[], ProcessDaemon]) -> None:
    first = start()
    with RawClient(endpoint) as raw:
        raw.hello()
        space = raw.ask(RegisterNamespace(id=0, namespace=SPACE), NamespaceReply)[0].namespace
        first.kill()
        queued = [raw.post(Lookup(id=0, namespaces=[space]), [KEYS.tobytes()]) for _ in range(10)]
        start()
        for number in queued:
            reply, _ = raw.receive()
            assert isinstance(reply, ErrorReply)
            assert (reply.id, reply.code) == (number, ErrorCode.STALE_EPOCH)
        assert raw.refused(Stats(id=0)).code == ErrorCode.STALE_EPOCH
        raw.hello()
        assert raw.alive()


def test_threads_share_a_client_and_a_slow_one_holds_up_nobody(
    endpoint: str, start: Callable[[], ProcessDaemon]
) -> None:
    daemon = start()
    with Client(endpoint, timeout_s=20, transfer_timeout_s=20) as client:
        handle = client.register(SPACE)
        assert client.store(handle, KEYS, BLOCKS).stored == 3
        failures: list[object] = []

        def work(number: int) -> None:
            mine, data = keys_of(2, first_token=1000 + 8 * number), blocks_of(2, seed=number)
            for _ in range(30):
                client.store(handle, mine, data)
                found = client.fetch(handle, mine)
                hits = client.lookup_many(handle, [KEYS, mine])
                if found.count != 2 or not np.array_equal(found.blocks, data) or [h.count for h in hits] != [3, 2]:
                    failures.append((number, found.count, hits))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        client.timeout_s = client.transfer_timeout_s = 0.3
        daemon.freeze()
        ended: list[int] = []
        threads = [threading.Thread(target=lambda: ended.append(client.lookup(handle, KEYS).count)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ended == [0] * 8


def test_closing_lets_waiting_threads_go(endpoint: str, start: Callable[[], ProcessDaemon]) -> None:
    daemon = start()
    client = Client(endpoint, timeout_s=100, transfer_timeout_s=100)
    handle = client.register(SPACE)
    daemon.freeze()
    ended: list[int] = []
    threads = [threading.Thread(target=lambda: ended.append(client.lookup(handle, KEYS).count)) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(client._connection.waited) == 3)
    time.sleep(0.05)
    client.close()
    for thread in threads:
        thread.join()
    assert ended == [0] * 3
    with pytest.raises(Unavailable, match="the client is closed"):
        client.lookup(handle, KEYS)
