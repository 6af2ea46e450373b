"""Stores of many blocks: even pieces, each committed while the next one is copied, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvtierd.core.errors import RequestError
from kvtierd.core.namespace import Namespace
from kvtierd.protocol import transfers
from kvtierd.protocol.client import Client
from kvtierd.protocol.messages import Commit
from kvtierd.testing.fake_daemon import ThreadDaemon
from tests.unit.protocol.conftest import EVEN, blocks_of, keys_of, refuse_second, until

SPACE = Namespace(model="m", geometry=EVEN)
MOST = 4


@pytest.fixture
def client(connect: Callable[..., Client], monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setattr(transfers, "PIECE_BYTES", MOST * EVEN.slot_bytes)
    return connect(timeout_s=5.0, transfer_timeout_s=5.0)


def nothing_held(client: Client, daemon: ThreadDaemon) -> None:
    """What nobody waited for is given back when it comes, with the client's next call."""
    until(lambda: client.ping() > 0 and not daemon.service.leases and not daemon.service.reservations)


def copied(
    client: Client, monkeypatch: pytest.MonkeyPatch, during: Callable[[int], None] = lambda _: None
) -> list[int]:
    """How many blocks each copy into slots has; `during` is called in each, with its number."""
    counts: list[int] = []
    fill = client._copier.fill

    def counting(blocks, views, geometry):
        counts.append(len(views))
        during(len(counts) - 1)
        return fill(blocks, views, geometry)

    monkeypatch.setattr(client._copier, "fill", counting)
    return counts


@pytest.mark.parametrize(("total", "pieces"), [(3, [3]), (4, [4]), (8, [8]), (9, [3, 3, 3]), (13, [4, 4, 4, 1])])
def test_pieces_are_even_and_two_are_one(
    client: Client, daemon: ThreadDaemon, monkeypatch: pytest.MonkeyPatch, total: int, pieces: list[int]
) -> None:
    counts = copied(client, monkeypatch)
    handle, keys, blocks = client.register(SPACE), keys_of(SPACE, total), blocks_of(SPACE, total)
    assert client.store(handle, keys, blocks).stored == total
    assert counts == pieces
    assert max(pieces) <= 2 * MOST
    np.testing.assert_array_equal(client.fetch(handle, keys).blocks, blocks)
    nothing_held(client, daemon)


def test_a_piece_is_committed_while_the_next_one_is_copied(
    client: Client, daemon: ThreadDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The copy of a piece does not go on before the daemon has the commit of the one before it.
    counts = copied(client, monkeypatch, lambda number: until(lambda: daemon.service.requests["Commit"] >= number))
    handle, keys = client.register(SPACE), keys_of(SPACE, 12)
    assert client.store(handle, keys, blocks_of(SPACE, 12)).stored == 12
    assert counts == [4, 4, 4]
    nothing_held(client, daemon)


def test_blocks_that_exist_and_those_without_room_are_counted_over_all_pieces(
    client: Client, daemon: ThreadDaemon
) -> None:
    handle, keys, blocks = client.register(SPACE), keys_of(SPACE, 70), blocks_of(SPACE, 70)
    client.store(handle, keys[2:7], blocks[2:7])
    stored = client.store(handle, keys, blocks)
    assert (stored.stored, stored.existed, stored.dropped) == (59, 5, 6)
    assert client.counters["blocks_dropped"] == 6
    nothing_held(client, daemon)


def test_a_commit_that_is_refused_raises_and_leaves_nothing(client: Client, daemon: ThreadDaemon) -> None:
    handle, keys = client.register(SPACE), keys_of(SPACE, 12)
    daemon.service.before = refuse_second(Commit)
    with pytest.raises(RequestError, match="no"):
        client.store(handle, keys, blocks_of(SPACE, 12))
    daemon.service.before = None
    nothing_held(client, daemon)
    assert client.lookup(handle, keys).count in {4, 12}, "the third piece may have been on its way"


def test_a_copy_that_fails_raises_and_leaves_nothing(
    client: Client, daemon: ThreadDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int) -> None:
        if number == 1:
            raise MemoryError("no")

    copied(client, monkeypatch, fail)
    handle, keys = client.register(SPACE), keys_of(SPACE, 12)
    with pytest.raises(MemoryError):
        client.store(handle, keys, blocks_of(SPACE, 12))
    nothing_held(client, daemon)
    assert client.lookup(handle, keys).count == 4, "the piece that was handed over is stored"


def test_blocks_of_a_session_that_ended_are_dropped(
    client: Client, daemon: ThreadDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = daemon.server.sessions

    def end(number: int) -> None:
        if number == 1:
            daemon.call(lambda: [sessions.end(peer) for peer in list(sessions.by_rid.values())])

    copied(client, monkeypatch, end)
    handle, keys, blocks = client.register(SPACE), keys_of(SPACE, 12), blocks_of(SPACE, 12)
    stored = client.store(handle, keys, blocks)
    assert stored.stored + stored.dropped == 12
    assert stored.dropped >= 4, "slots of a session that has ended are nobody's"
    monkeypatch.undo()
    again = client.store(handle, keys, blocks)
    assert again.stored + again.existed == 12
