"""A client process that attends until it is told to stop (SIGTERM); exit status 1 where a result was wrong."""

from __future__ import annotations

import signal
import sys
import threading

import numpy as np

from kvtierd import Client
from kvtierd.core.geometry import Geometry
from kvtierd.gpu.reference.attention import relative_error
from kvtierd.testing.attention import random_kv

SHAPE = Geometry(block_size=64, layers=3, kv_heads=2, k_dim=64, v_dim=64)


def main(endpoint: str, seed: int) -> int:
    """Attend with queries of one's own."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    kv = random_kv(SHAPE, 24, seed=2, model="integration")
    q = np.random.default_rng(seed).standard_normal((1, 4, 64)).astype(np.float32)
    expected = [kv.reference(q, layer, 24 * 64)[0] for layer in range(SHAPE.layers)]
    with Client(endpoint, timeout_s=30) as client:
        handle = client.register(kv.namespace)
        client.pin(handle, kv.names[:0])  # attached to the arena or not, the session ends with the process
        with client.open_sequence(handle, kv.names, timeout_s=60) as sequence:
            turn = 0
            while not stop.is_set():
                layer = turn % SHAPE.layers
                if relative_error(sequence.attend(layer, q).output, expected[layer]) > 1e-5:
                    return 1
                if turn == 3:
                    sys.stdout.write("attending\n")
                    sys.stdout.flush()
                turn += 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
