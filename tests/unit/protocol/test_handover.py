"""The arena socket: who gets descriptors, what is refused, and what the daemon learns of a process."""

from __future__ import annotations

import array
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvtierd.core.namespace import Namespace
from kvtierd.protocol import handover
from kvtierd.protocol.arena import Arena, ArenaError
from kvtierd.protocol.client import Client
from kvtierd.protocol.messages import (
    AnyArenaReply,
    ArenaChunk,
    ArenaGone,
    ArenaHello,
    ArenaMap,
    ArenaReady,
    ArenaRefused,
)
from kvtierd.testing.fake_chunk import CHUNK
from kvtierd.testing.fake_daemon import ThreadDaemon
from kvtierd.testing.raw_client import RawClient
from tests.unit.protocol.conftest import PADDED, blocks_of, keys_of, until

pack = msgspec.msgpack.encode
read = msgspec.msgpack.Decoder(AnyArenaReply).decode


class Plug:
    """A bare connection to the arena socket."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(20)
        self.socket.connect(str(path))

    def ask(self, message: object) -> AnyArenaReply:
        self.socket.send(message if isinstance(message, bytes) else pack(message))
        return self.receive()

    def receive(self) -> AnyArenaReply:
        data, descriptors, _, _ = socket.recv_fds(self.socket, 4096, 4)
        for descriptor in descriptors:
            os.close(descriptor)
        return read(data)

    def hung_up(self) -> bool:
        return self.socket.recv(1) == b""


@pytest.fixture
def plug(daemon: ThreadDaemon) -> Iterator[Callable[[], Plug]]:
    plugs: list[Plug] = []

    def make() -> Plug:
        assert daemon.server.arena is not None
        plugs.append(Plug(daemon.server.arena.path))
        return plugs[-1]

    yield make
    for item in plugs:
        item.socket.close()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_session_attaches_and_maps(daemon: ThreadDaemon, raw: RawClient, plug: Callable[[], Plug]) -> None:
    mine = plug()
    ready = mine.ask(ArenaHello(raw.token))
    assert ready == ArenaReady(daemon.server.epoch)
    session = daemon.call(lambda: next(iter(daemon.server.sessions)).session)
    assert session.attached
    assert (session.pid, session.uid) == (os.getpid(), os.getuid())
    chunk = mine.ask(ArenaMap(CHUNK))
    assert chunk == ArenaChunk(CHUNK, 16384 * 64, 16384, 64)
    assert mine.ask(ArenaMap(CHUNK + 1)) == ArenaGone(CHUNK + 1)


def test_a_wrong_token_is_refused(raw: RawClient, plug: Callable[[], Plug]) -> None:
    for token in (bytes(16), b"", raw.token[:-1]):
        mine = plug()
        refused = mine.ask(ArenaHello(token))
        assert isinstance(refused, ArenaRefused)
        assert "token" in refused.message
        assert mine.hung_up()
    assert raw.alive()


def test_a_session_attaches_once(raw: RawClient, plug: Callable[[], Plug]) -> None:
    first, second = plug(), plug()
    assert isinstance(first.ask(ArenaHello(raw.token)), ArenaReady)
    assert isinstance(second.ask(ArenaHello(raw.token)), ArenaRefused)
    assert isinstance(first.ask(ArenaMap(CHUNK)), ArenaChunk)
    assert raw.alive()


@pytest.mark.parametrize(
    "message", [b"", b"\xc1", pack({"op": "x"}), pack(["arena_hello"]), bytes(5000), b"\x91" * 4000]
)
def test_messages_that_are_none_are_refused(raw: RawClient, plug: Callable[[], Plug], message: bytes) -> None:
    mine = plug()
    if message:
        assert isinstance(mine.ask(message), ArenaRefused)
    else:
        mine.socket.shutdown(socket.SHUT_WR)
    assert mine.hung_up()
    assert raw.alive()


def test_mapping_wants_hello_first(plug: Callable[[], Plug]) -> None:
    assert isinstance(plug().ask(ArenaMap(CHUNK)), ArenaRefused)


def test_descriptors_that_a_client_sends_are_closed(raw: RawClient, plug: Callable[[], Plug]) -> None:
    mine = plug()
    assert isinstance(mine.ask(ArenaHello(raw.token)), ArenaReady)
    reader, writer = os.pipe()
    before = open_descriptors()
    for _ in range(50):
        rights = array.array("i", [writer] * 20)
        mine.socket.sendmsg([pack(ArenaMap(CHUNK + 1))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        assert isinstance(mine.receive(), ArenaGone)
    until(lambda: open_descriptors() <= before)
    os.close(writer)
    assert os.read(reader, 1) == b""  # no copy of the writing end is left anywhere
    os.close(reader)


def test_a_process_that_is_not_visible_uses_frames(
    daemon: ThreadDaemon, connect: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Blind:
        """The kernel's credentials of a peer in another pid namespace."""

        size = 12

        @staticmethod
        def unpack(_: bytes) -> tuple[int, int, int]:
            return 0, 1000, 1000

    monkeypatch.setattr(handover, "_UCRED", Blind)
    client = connect()
    space = Namespace(model="m", geometry=PADDED)
    handle = client.register(space)
    keys, blocks = keys_of(space, 3), blocks_of(space, 3)
    assert client.store(handle, keys, blocks).stored == 3
    assert client.fetch(handle, keys).count == 3
    assert client.counters["arena_refused"] == 1
    assert "not visible" in client._slots.refusal
    assert daemon.service.requests["Put"] == 1


@pytest.mark.parametrize("newest_kernel", [True, False])
def test_the_end_of_a_connection_ends_the_session(
    daemon: ThreadDaemon, plug: Callable[[], Plug], monkeypatch: pytest.MonkeyPatch, newest_kernel: bool
) -> None:
    if not newest_kernel:
        monkeypatch.setattr(handover, "_SO_PEERPIDFD", 250)
    before = open_descriptors()
    with RawClient(daemon.endpoint) as raw:
        raw.hello()
        mine = plug()
        assert isinstance(mine.ask(ArenaHello(raw.token)), ArenaReady)
        mine.socket.close()
        until(lambda: daemon.call(lambda: len(daemon.server.sessions)) == 0)
        assert daemon.service.log == ["opened 1", "detached 1"]
        raw.hello()
        assert daemon.service.log[-1] == "opened 2"
    del mine
    until(lambda: open_descriptors() <= before)


def test_reservations_of_a_living_process_wait_for_its_end(
    daemon: ThreadDaemon, connect: Callable[..., Client]
) -> None:
    client = connect()
    space = Namespace(model="m", geometry=PADDED)
    handle = client.register(space)
    client.reserve(handle, keys_of(space, 2))
    client.close()
    until(lambda: daemon.call(lambda: len(daemon.server.sessions)) == 0)
    assert daemon.service.log == ["opened 1", "detached 1"]
    arena = daemon.server.arena
    assert arena is not None
    process = daemon.call(lambda: next(iter(arena._processes.values())))
    assert [session.id for session in process.sessions] == [1]
    daemon.call(lambda: arena._process_gone(process))
    assert daemon.service.log[-1] == "gone 1"
    assert not daemon.service.reservations
    assert not arena._processes


def test_a_process_that_leaves_too_much_behind_is_refused(
    daemon: ThreadDaemon, connect: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "MAX_DETACHED", 2)
    space = Namespace(model="m", geometry=PADDED)
    for turn in range(3):
        client = connect()
        handle = client.register(space)
        granted = client.reserve(handle, keys_of(space, 1, first_token=1000 * turn)).views[0] is not None
        client.close()
        until(lambda: daemon.call(lambda: len([p for p in daemon.server.sessions if p.session.attached])) == 0)
        assert granted == (turn < 2)
    assert "still hold slots" in client._slots.refusal


def test_a_chunk_that_leaves_the_arena_is_announced(
    daemon: ThreadDaemon, raw: RawClient, plug: Callable[[], Plug]
) -> None:
    mine = plug()
    mine.ask(ArenaHello(raw.token))
    arena = daemon.server.arena
    assert arena is not None
    daemon.call(lambda: arena.chunk_gone(CHUNK))  # not mapped yet: nobody is told
    mine.ask(ArenaMap(CHUNK))
    daemon.call(lambda: arena.chunk_gone(CHUNK))
    assert mine.receive() == ArenaGone(CHUNK)


def test_connections_are_limited_and_idle_ones_keep_no_client_out(
    daemon: ThreadDaemon, raw: RawClient, plug: Callable[[], Plug]
) -> None:
    arena = daemon.server.arena
    assert arena is not None
    arena._max_connections = 2
    attached, idle = plug(), plug()
    assert isinstance(attached.ask(ArenaHello(raw.token)), ArenaReady)
    extra = plug()
    assert isinstance(idle.receive(), ArenaRefused)
    assert idle.hung_up()
    arena._max_connections = 1
    last = plug()
    assert isinstance(last.receive(), ArenaRefused)
    assert last.hung_up()
    assert isinstance(extra.receive(), ArenaRefused)
    assert isinstance(attached.ask(ArenaMap(CHUNK)), ArenaChunk)


def test_sessions_that_live_do_not_count_as_left_behind(
    connect: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "MAX_DETACHED", 2)
    space = Namespace(model="m", geometry=PADDED)
    for turn in range(4):
        client = connect()
        handle = client.register(space)
        assert client.reserve(handle, keys_of(space, 1, first_token=1000 * turn)).views[0] is not None


def test_a_client_that_does_not_read_its_arena_socket_is_hung_up_on(
    daemon: ThreadDaemon, raw: RawClient, plug: Callable[[], Plug]
) -> None:
    mine = plug()
    mine.ask(ArenaHello(raw.token))
    mine.socket.settimeout(0)
    for _ in range(100_000):
        try:
            mine.socket.send(pack(ArenaMap(CHUNK + 1)))
        except BlockingIOError:
            time.sleep(0.001)
        except (BrokenPipeError, ConnectionResetError):
            break
    else:
        raise AssertionError("the daemon took everything")
    until(lambda: daemon.call(lambda: len(daemon.server.sessions)) == 0)


def test_a_refusal_is_an_arena_error(daemon: ThreadDaemon) -> None:
    assert daemon.server.arena is not None
    path = str(daemon.server.arena.path)
    deadline_ns = time.monotonic_ns() + 20_000_000_000
    with pytest.raises(ArenaError, match="token"):
        Arena.attach(path, bytes(16), deadline_ns)
    with pytest.raises(ArenaError, match="cannot attach"):
        Arena.attach(path + "x", bytes(16), deadline_ns)
