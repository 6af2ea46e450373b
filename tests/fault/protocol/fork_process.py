"""A process that forks while its client is in use; both sides go on, each with a connection of its own.

Run as `fork_process.py ENDPOINT`; prints `fine` when every check in parent and child holds.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
from os import _exit, fork  # nothing of ours forks, but engines do: what happens then is what is tested here

import numpy as np

from kvtierd.protocol.client import Client
from kvtierd.protocol.mapping import _alive
from tests.fault.protocol.conftest import SPACE, blocks_of, keys_of


def child(client: Client, handle: object, view: np.ndarray) -> None:
    found = client.fetch(handle, keys_of(3))  # type: ignore[arg-type]
    assert found.count == 3, found
    np.testing.assert_array_equal(found.blocks, blocks_of(3))
    assert client.counters["sessions"] == 2
    faulted = fork()
    if not faulted:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        view[0] = 9  # the parent's slot did not come along
        _exit(0)
    _, status = os.waitpid(faulted, 0)
    assert os.WIFSIGNALED(status), status
    assert os.WTERMSIG(status) == signal.SIGSEGV
    client.close()
    for _ in range(200):  # memory of the child's own must not land where a mapping of the parent's was
        mmap.mmap(-1, 1 << 20).close()


def main() -> None:
    client = Client(sys.argv[1], timeout_s=20, transfer_timeout_s=20)
    handle = client.register(SPACE)
    client.store(handle, keys_of(3), blocks_of(3))
    reservation = client.reserve(handle, keys_of(1, first_token=700))
    view = reservation.views[0]
    assert view is not None
    assert len(_alive) == 2
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            client.lookup(handle, keys_of(3))

    busy = threading.Thread(target=look)
    busy.start()
    for _ in range(3):
        pid = fork()
        if not pid:
            child(client, handle, view)
            _exit(0)
        _, status = os.waitpid(pid, 0)
        assert status == 0, status
    stop.set()
    busy.join()
    view[:] = 0
    assert reservation.commit(verify=True) == 1
    assert client.fetch(handle, keys_of(3)).count == 3
    assert client.counters["sessions"] == 1
    client.close()
    sys.stdout.write("fine\n")


if __name__ == "__main__":
    main()
