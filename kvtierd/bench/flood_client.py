"""A process that sends a daemon what it must refuse, as fast as it is taken: for `kvtierctl bench flood`.

python -m kvtierd.bench.flood_client ENDPOINT    until standard input ends; then it prints how much it sent
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Iterator

import numpy as np
import zmq

from kvtierd.core.keys import KEY_BYTES
from kvtierd.protocol.codec import decode_reply, encode
from kvtierd.protocol.messages import MAX_BATCH, PROTOCOL_VERSION, Hello, HelloReply, Lookup

BURST = 64
"""Messages between two looks at what came back."""
PATIENCE_MS = 20_000


def flood(endpoint: str) -> int:
    """Say hello, then send garbage, half-right messages and oversized batches in turn; how many were sent."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        socket.send(encode(Hello(id=1, versions=(PROTOCOL_VERSION, PROTOCOL_VERSION), client="flood")))
        if not socket.poll(PATIENCE_MS):
            raise SystemExit("nobody answers there")
        welcome = decode_reply(memoryview(socket.recv_multipart()[0]))
        assert isinstance(welcome, HelloReply), welcome
        print("floods", flush=True)
        sent = 0
        for message in _messages(welcome.epoch):
            try:
                socket.send_multipart(message, zmq.NOBLOCK)
                sent += 1
            except zmq.Again:
                time.sleep(0.0005)  # its queue is full: it takes what it can
            if sent % BURST == 0:
                while socket.poll(0):
                    socket.recv_multipart()
                if select.select([sys.stdin], [], [], 0)[0]:
                    break
        return sent


def _messages(epoch: int) -> Iterator[list[bytes]]:
    rng = np.random.default_rng(1)
    garbage = [rng.integers(0, 256, size, np.uint8).tobytes() for size in (1, 64, 4096)]
    keys = rng.integers(0, 256, ((MAX_BATCH + 1) * KEY_BYTES,), np.uint8).tobytes()
    number = 2
    while True:
        for junk in garbage:
            yield [junk]
            yield [b"", junk, junk]
        for namespace in (1, 1 << 30):
            header = encode(Lookup(id=number, epoch=epoch, deadline_ns=1 << 62, namespaces=[namespace]))
            yield [header, keys]
            yield [header]
            number += 1


if __name__ == "__main__":
    print(flood(sys.argv[1]), flush=True)
