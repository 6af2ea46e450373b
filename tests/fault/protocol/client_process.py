"""A client process that a test kills: attaches, holds what it is told to hold, says so, and waits."""

from __future__ import annotations

import sys

from kvtierd.protocol.client import Client
from tests.fault.protocol.conftest import SPACE, blocks_of, keys_of


def main() -> None:
    endpoint, what = sys.argv[1:]
    with Client(endpoint, timeout_s=20, transfer_timeout_s=20) as client:
        handle = client.register(SPACE)
        client.store(handle, keys_of(3), blocks_of(3))
        held: list[object] = [client.acquire(handle, keys_of(3))]
        if what == "reservation":
            reservation = client.reserve(handle, keys_of(2, first_token=500))
            for view in reservation.views:
                assert view is not None
                view[:100] = 1
            held.append(reservation)
        sys.stdout.write("holding\n")
        sys.stdout.flush()
        sys.stdin.read()
        del held


if __name__ == "__main__":
    main()
