"""Mooncake Store's side of `kvtierctl bench peers`: run by the interpreter of its own environment, not of ours.

python peer_mooncake_client.py RPC_PORT HTTP_PORT OBJECTS OBJECT_BYTES. Each line on standard input is one round,
`store`, `load` or `lookup`; the answer is its seconds in JSON. Buffers are registered and moved in batches, which is
its fastest way; what was loaded is compared with what was stored outside the time that is told.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

LOOKUPS = 200
TURNS = 12
"""Stores that there is room for: what was read lately cannot be removed, so nothing is."""


class Peer:
    """Objects of random bytes, and a store on this host over TCP."""

    def __init__(self, rpc_port: int, http_port: int, objects: int, object_bytes: int) -> None:
        from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

        total = objects * object_bytes
        self.store: Any = MooncakeDistributedStore()
        metadata = f"http://127.0.0.1:{http_port}/metadata"
        master = f"127.0.0.1:{rpc_port}"
        code = self.store.setup("127.0.0.1", metadata, TURNS * total, 64 << 20, "tcp", "", master)
        if code:
            raise SystemExit(f"setup answered {code}")
        self.source = np.random.default_rng(1).integers(0, 256, (objects, object_bytes), np.uint8)
        self.out = np.zeros_like(self.source)
        for memory in (self.source, self.out):
            self.store.register_buffer(memory.ctypes.data, memory.nbytes)
        self.sizes = [object_bytes] * objects
        self.turn = 0

    def keys(self) -> list[str]:
        """Of the objects of this turn."""
        return [f"{self.turn}-{number}" for number in range(len(self.sizes))]

    def store_all(self) -> float:
        """Seconds to put all objects under fresh keys."""
        self.turn += 1
        keys, places = self.keys(), [int(row.ctypes.data) for row in self.source]
        begin = time.perf_counter()
        codes = self.store.batch_put_from(keys, places, self.sizes)
        seconds = time.perf_counter() - begin
        if any(codes):
            raise SystemExit(f"batch_put_from answered {sorted(set(codes))}")
        return seconds

    def load_all(self) -> float:
        """Seconds to get all objects."""
        self.out[:] = 0
        places = [int(row.ctypes.data) for row in self.out]
        begin = time.perf_counter()
        read = self.store.batch_get_into(self.keys(), places, self.sizes)
        seconds = time.perf_counter() - begin
        if list(read) != self.sizes:
            raise SystemExit(f"batch_get_into answered {sorted(set(read))}")
        if wrong := np.flatnonzero((self.out != self.source).any(axis=1)).tolist():
            raise SystemExit(f"other bytes came back in objects {wrong}")
        return seconds

    def lookup(self) -> float:
        """Seconds of one lookup of all keys, of many."""
        keys = self.keys()
        begin = time.perf_counter()
        for _ in range(LOOKUPS):
            found = self.store.batch_is_exist(keys)
        seconds = (time.perf_counter() - begin) / LOOKUPS
        if set(found) != {1}:
            raise SystemExit("not everything is found")
        return seconds


def main() -> None:
    """Answer rounds until standard input ends."""
    peer = Peer(*map(int, sys.argv[1:5]))
    works = {"store": peer.store_all, "load": peer.load_all, "lookup": peer.lookup}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": works[line.strip()]()}), flush=True)


if __name__ == "__main__":
    main()
