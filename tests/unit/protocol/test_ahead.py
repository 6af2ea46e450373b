"""Batches asked for ahead: the same blocks as one by one, nothing left behind, and never more than two under way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import numpy as np
import pytest

from kvtierd.core.checksum import layer_sums
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.namespace import Namespace
from kvtierd.protocol.aio import AsyncClient
from kvtierd.protocol.client import Client
from kvtierd.protocol.holds import Reservation
from kvtierd.protocol.messages import SLOT_BUSY, SLOT_EXISTS, AnyRequest, Commit, Reserve
from kvtierd.protocol.service import Session
from kvtierd.testing.fake_daemon import ThreadDaemon
from tests.unit.protocol.conftest import EVEN, blocks_of, keys_of, refuse_second, until

SPACE = Namespace(model="m", geometry=EVEN)


@pytest.fixture
def client(connect: Callable[..., Client]) -> Client:
    return connect()


def nothing_held(daemon: ThreadDaemon) -> None:
    until(lambda: not daemon.service.leases and not daemon.service.reservations)


def fill(reservation: Reservation, blocks: np.ndarray) -> None:
    for view, block in zip(reservation.views, blocks, strict=True):
        if view is not None:
            view[: block.size] = block


def test_leases_go_through_the_whole_run(client: Client, daemon: ThreadDaemon) -> None:
    handle, keys, blocks = client.register(SPACE), keys_of(SPACE, 11), blocks_of(SPACE, 11)
    client.store(handle, keys, blocks)
    got, most = [], 0
    for lease in client.leases(handle, keys, batch=4):
        got += [view[: EVEN.block_bytes].copy() for view in lease.views]
        most = max(most, len(daemon.service.leases))
    np.testing.assert_array_equal(np.array(got), blocks)
    assert most <= 3, "the present one, the next, and the one behind it"
    assert daemon.service.requests["Acquire"] == 3
    nothing_held(daemon)


@pytest.mark.parametrize("missing", [0, 3, 4, 6, 8])
def test_leases_end_at_the_first_missing_block(client: Client, daemon: ThreadDaemon, missing: int) -> None:
    handle, keys, blocks = client.register(SPACE), keys_of(SPACE, 12), blocks_of(SPACE, 12)
    client.store(handle, keys, blocks)
    client.delete(handle, keys[missing : missing + 1])
    counts = [lease.count for lease in client.leases(handle, keys, batch=4)]
    assert sum(counts) == missing
    assert all(count == 4 for count in counts[:-1])
    nothing_held(daemon)


def test_leases_that_are_left_early_hold_nothing(client: Client, daemon: ThreadDaemon) -> None:
    handle, keys = client.register(SPACE), keys_of(SPACE, 12)
    client.store(handle, keys, blocks_of(SPACE, 12))
    steps = client.leases(handle, keys, batch=4)
    next(steps)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    nothing_held(daemon)
    assert client.lookup(handle, keys).count == 12


@pytest.mark.parametrize("wait", [True, False])
def test_reservations_store_everything(client: Client, daemon: ThreadDaemon, *, wait: bool) -> None:
    handle, keys, blocks = client.register(SPACE), keys_of(SPACE, 11), blocks_of(SPACE, 11)
    client.store(handle, keys[5:6], blocks[5:6])
    committed, existing = 0, 0
    for number, reservation in enumerate(client.reservations(handle, keys, batch=4)):
        fill(reservation, blocks[4 * number : 4 * number + 4])
        existing += int((reservation.status == SLOT_EXISTS).sum())
        committed += reservation.commit(wait=wait)
        assert len(daemon.service.reservations) <= 3
    assert (committed, existing) == (10, 1)
    np.testing.assert_array_equal(client.fetch(handle, keys).blocks, blocks)
    assert client.counters["stores_dropped_refused"] == 0
    nothing_held(daemon)


def test_reservations_that_are_left_early_are_given_back(client: Client, daemon: ThreadDaemon) -> None:
    handle, keys = client.register(SPACE), keys_of(SPACE, 12)
    steps = client.reservations(handle, keys, batch=4)
    fill(next(steps), blocks_of(SPACE, 4))
    steps.close()  # type: ignore[attr-defined]
    nothing_held(daemon)
    assert client.lookup(handle, keys).count == 0
    assert client.stats()["slots_free"] == 64


def test_reservations_beyond_the_room_are_busy_and_the_others_whole(client: Client) -> None:
    handle, keys, blocks = client.register(SPACE), keys_of(SPACE, 70), blocks_of(SPACE, 70)
    busy = 0
    for number, reservation in enumerate(client.reservations(handle, keys)):
        fill(reservation, blocks[32 * number : 32 * number + 32])
        busy += int((reservation.status == SLOT_BUSY).sum())
        reservation.commit()
    assert busy == 6
    assert client.lookup(handle, keys).count == 64


def test_a_batch_of_nothing_is_the_callers_mistake(client: Client) -> None:
    handle = client.register(SPACE)
    with pytest.raises(ValueError, match="batch is 0"):
        client.leases(handle, keys_of(SPACE, 2), batch=0)
    with pytest.raises(ValueError, match="batch is -1"):
        client.reservations(handle, keys_of(SPACE, 2), batch=-1)


def test_without_a_daemon_there_are_no_leases_and_no_slots(tmp_path: object) -> None:
    with Client(f"ipc://{tmp_path}/none", timeout_s=0.2, transfer_timeout_s=0.2) as client:
        handle, keys = client.register(SPACE), keys_of(SPACE, 8)
        assert list(client.leases(handle, keys, batch=4)) == []
        for reservation in client.reservations(handle, keys, batch=4):
            assert reservation.status.tolist() == [SLOT_BUSY] * 4
            assert reservation.commit() == 0


def test_a_quiet_commit_that_is_refused_is_counted_and_one_that_is_not_is_settled(
    client: Client, daemon: ThreadDaemon
) -> None:
    handle, keys, blocks = client.register(SPACE), keys_of(SPACE, 8), blocks_of(SPACE, 8)
    refuse = False

    def before(session: Session, request: AnyRequest) -> None:
        del session
        if isinstance(request, Commit):
            assert request.quiet
            if refuse:
                raise RequestError(ErrorCode.CHECKSUM_MISMATCH, "no")

    daemon.service.before = before
    for number, reservation in enumerate(client.reservations(handle, keys, batch=4)):
        refuse = number == 1
        fill(reservation, blocks[4 * number : 4 * number + 4])
        assert reservation.commit(wait=False) == 4
        client.ping()  # requests are served in their order: that commit has been by now
    daemon.service.before = None
    assert client.lookup(handle, keys).count == 4
    assert client.counters["stores_dropped_refused"] == 4
    assert not client._connection._handed_over._quiet
    assert client.counters["late_replies"] == 0


def test_a_verified_commit_that_nobody_waits_for_is_counted_by_its_own_answer(
    client: Client, daemon: ThreadDaemon
) -> None:
    handle, keys, blocks = client.register(SPACE), keys_of(SPACE, 2), blocks_of(SPACE, 2)
    with client.reserve(handle, keys) as reservation:
        fill(reservation, blocks)
        sums = np.array([layer_sums(view, EVEN) for view in reservation.views if view is not None])
        sums[1] += 1
        assert reservation.commit(sums=sums, verify=True, wait=False) == 2
        until(lambda: client.ping() > 0 and client.counters["stores_dropped_refused"] == 2)
    assert daemon.service.requests["Commit"] == 1


def test_a_run_goes_on_behind_a_new_session(client: Client, daemon: ThreadDaemon) -> None:
    handle, keys, blocks = client.register(SPACE), keys_of(SPACE, 12), blocks_of(SPACE, 12)
    client.store(handle, keys, blocks)
    counts, sessions = [], daemon.server.sessions
    for lease in client.leases(handle, keys, batch=4):
        counts.append(lease.count)
        if len(counts) == 1:
            # The session is lost with the next lease under way, as when the daemon forgets it.
            daemon.call(lambda: [sessions.end(peer) for peer in list(sessions.by_rid.values())])
    assert sum(counts) in (4, 12), "either all of it, asked again, or what was there before"
    assert client.lookup(handle, keys).count == 12


def test_a_batch_tells_what_comes_before_it_also_when_it_is_asked_again(client: Client, daemon: ThreadDaemon) -> None:
    handle, keys = client.register(SPACE), keys_of(SPACE, 12)
    parents: list[bytes] = []
    sessions = daemon.server.sessions

    def before(session: Session, request: AnyRequest) -> None:
        del session
        if isinstance(request, Reserve):
            parents.append(request.parent)

    daemon.service.before = before
    wanted = [b"", keys[3].tobytes(), keys[7].tobytes()]
    for number, reservation in enumerate(client.reservations(handle, keys, batch=4)):
        if number == 0:
            until(lambda: len(parents) == 2)
            daemon.call(lambda: [sessions.end(peer) for peer in list(sessions.by_rid.values())])
        del reservation
    daemon.service.before = None
    assert set(parents) == set(wanted)
    assert parents[:2] == wanted[:2]


def test_a_reserve_that_is_refused_raises_and_leaves_nothing(client: Client, daemon: ThreadDaemon) -> None:
    handle, keys = client.register(SPACE), keys_of(SPACE, 12)
    daemon.service.before = refuse_second(Reserve)
    steps = client.reservations(handle, keys, batch=4)
    assert next(steps).commit() == 4
    with pytest.raises(RequestError, match="no"):
        next(steps)
    daemon.service.before = None
    nothing_held(daemon)


def test_the_async_client_does_the_same(daemon: ThreadDaemon) -> None:
    keys, blocks = keys_of(SPACE, 11), blocks_of(SPACE, 11)

    async def body() -> None:
        async with AsyncClient(daemon.endpoint, timeout_s=20.0, transfer_timeout_s=20.0) as client:
            handle = await client.register(SPACE)
            number = 0
            async for reservation in client.reservations(handle, keys, batch=4):
                for view, block in zip(reservation.views, blocks[4 * number :], strict=False):
                    assert view is not None
                    view[: block.size] = block
                number += 1
                assert await reservation.commit(wait=False) == len(reservation.views)
            out = np.empty((4, EVEN.block_bytes), np.uint8)
            got = []
            async for lease in client.leases(handle, keys, batch=4):
                assert await lease.copy_to(out) == lease.count
                got.append(out[: lease.count].copy())
            np.testing.assert_array_equal(np.concatenate(got), blocks)
            async with contextlib.aclosing(client.leases(handle, keys, batch=2)) as steps:
                async for lease in steps:
                    assert lease.count == 2
                    break
            assert (await client.lookup(handle, keys)).count == 11

    asyncio.run(body())
    nothing_held(daemon)
