"""Thousands of connections cost only those who open them: libzmq would abort the process without descriptors."""

from __future__ import annotations

import contextlib
import resource
import socket

from kvtierd import Client, Unavailable
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.testing.waiting import wait_for

LIMIT = 600


@contextlib.contextmanager
def few_descriptors():
    """What is spawned meanwhile may open few files, so that a flood is small."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_flood_of_connections_does_not_end_the_daemon(tmp_path):
    # With so few sessions the daemon has no reason to raise the limit by itself.
    settings = {"host__capacity": "64MiB", "nvme__directory": "", "gpu__capacity": 0, "server__max_sessions": 64}
    daemon = EmbeddedDaemon(tmp_path, **settings)
    with few_descriptors():
        daemon.start()
    with contextlib.closing(daemon):
        path = daemon.endpoint.removeprefix("ipc://")
        with Client(daemon.endpoint, timeout_s=5) as early, contextlib.ExitStack() as flood:
            early.ping()
            opened = 0
            for _ in range(2 * LIMIT):
                peer = flood.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                try:
                    peer.connect(path)
                except OSError:  # the listener is closed, as it should be
                    break
                opened += 1
            assert LIMIT * 0.4 < opened < LIMIT, "the flood proved nothing"
            early.ping()
        with Client(daemon.endpoint, timeout_s=5) as late:
            wait_for(lambda: _answers(late))
        assert "no more are accepted" in daemon.logs()
        assert daemon.stop() == 0


def _answers(client):
    try:
        client.ping()
    except Unavailable:
        return False
    return True
