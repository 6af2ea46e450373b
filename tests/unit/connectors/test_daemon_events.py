"""Following the daemon's KV events: in order, and in doubt wherever some may be missing."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import msgspec
import pytest
import zmq

from kvtierd.connectors.daemon_events import DaemonEvents
from kvtierd.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvtierd.testing.waiting import wait_for

STORED = BlockStored([b"a" * 32], None, [], 16, None, "host", None)
REMOVED = BlockRemoved([b"a" * 32, b"b" * 32], "host")


class Notes:
    def __init__(self):
        self.heard = []
        self.threads = set()

    def _note(self, what):
        self.threads.add(threading.current_thread().name)
        self.heard.append(what)

    def stored(self, keys):
        self._note(("stored", [key[:1] for key in keys]))

    def removed(self, keys):
        self._note(("removed", [key[:1] for key in keys]))

    def doubt(self):
        self._note("doubt")


class Daemon:
    """Its events, by hand."""

    def __init__(self, path):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.bind(f"ipc://{path}")

    def joined(self):
        assert self._socket.poll(30_000), "nobody subscribes"
        assert self._socket.recv() == b"\x01"

    def say(self, number, *events):
        self.say_raw(number, msgspec.msgpack.encode(EventBatch(1.0, list(events), 0)))

    def say_raw(self, number, payload):
        self._socket.send_multipart((b"", number.to_bytes(8, "big"), payload))

    def close(self):
        self._context.destroy(linger=0)


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="kvt-") as name:
        yield Path(name)


@pytest.fixture
def daemon(folder):
    made = Daemon(folder / "events.sock")
    yield made
    made.close()


@pytest.fixture
def life():
    return [7]


@pytest.fixture
def notes(folder, life, daemon):
    made = Notes()
    following = DaemonEvents(f"ipc://{folder}/kvtierd.sock", made, lambda: life[0])
    daemon.joined()
    yield made
    following.close()


def heard(notes, *expected):
    wait_for(lambda: len(notes.heard) >= len(expected), 30)
    assert notes.heard == list(expected)


def test_events_are_told_in_their_order(daemon, notes):
    daemon.say(41, STORED, REMOVED)
    daemon.say(42, STORED)
    heard(notes, ("stored", [b"a"]), ("removed", [b"a", b"b"]), ("stored", [b"a"]))


def test_a_gap_is_doubt(daemon, notes):
    daemon.say(1, STORED)
    daemon.say(3, REMOVED)
    daemon.say(4, STORED)
    heard(notes, ("stored", [b"a"]), "doubt", ("removed", [b"a", b"b"]), ("stored", [b"a"]))


def test_a_cleared_cache_is_doubt(daemon, notes):
    daemon.say(0, AllBlocksCleared())
    heard(notes, "doubt")


def test_an_event_that_nobody_understands_is_doubt_and_others_follow(daemon, notes):
    daemon.say_raw(0, b"\xff\x00")
    daemon.say_raw(1, msgspec.msgpack.encode([1.0, [["BlockPainted", []]], 0]))
    daemon.say(2, STORED)
    heard(notes, "doubt", "doubt", ("stored", [b"a"]))


def test_another_life_of_the_daemon_is_doubt(life, notes):
    life[0] = 8
    heard(notes, "doubt")


def test_the_first_life_of_a_daemon_is_none(folder, life, daemon):
    life[0] = 0
    made = Notes()
    following = DaemonEvents(f"ipc://{folder}/kvtierd.sock", made, lambda: life[0])
    daemon.joined()
    life[0] = 9
    daemon.say(5, STORED)
    heard(made, ("stored", [b"a"]))
    following.close()
    assert made.threads == {"kvtierd-events"}


def test_a_daemon_on_another_machine_has_no_events():
    with pytest.raises(ValueError, match="tcp://there:1"):
        DaemonEvents("tcp://there:1", Notes(), lambda: 0)
