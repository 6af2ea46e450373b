"""A client that does everything at random until its time is over, and checks every byte and number that it gets.

`python -m tests.torture.soak_process ENDPOINT SEED SECONDS`: prints `tally NAME COUNT …` every few seconds and at the
end, and `wrong …` for whatever is wrong.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter

import numpy as np

from kvtierd import Client, Unavailable
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.gpu.reference.attention import reference_attention, relative_error
from tests.torture.driver import say
from tests.torture.prompts import SHAPE, SPACE, content_of, keys_of, wrong_blocks

PROMPTS, MOST_BLOCKS = 200, 16
TELL_EVERY_S = 5.0
ERROR_MAX = 1e-4
"""Of attention against float64."""
REFUSALS = {ErrorCode.BUSY, ErrorCode.NOT_PRESENT, ErrorCode.DEADLINE}
"""What full pools may answer."""


class Soak:
    """One client's work. Prompts are shared by all clients, and four times what host and nvme hold together."""

    def __init__(self, client: Client, seed: int) -> None:
        self.client, self.rng, self.tally = client, random.Random(seed), Counter[str]()
        self.space = client.register(SPACE)
        self.works = {self.store: 6, self.fetch: 6, self.hold: 2, self.attend: 2, self.prefetch: 1, self.pin: 1,
                      self.delete: 1, self.write_and_abort: 1, self.purge: 0.1, self.flush: 0.2}  # fmt: skip

    def some_keys(self) -> np.ndarray:
        """A prompt; a quarter of the prompts gets half of the requests."""
        prompt = self.rng.randrange(PROMPTS // 4 if self.rng.random() < 0.5 else PROMPTS)
        return keys_of(prompt, self.rng.randint(1, MOST_BLOCKS))

    def check(self, what: str, blocks: np.ndarray, keys: np.ndarray) -> None:
        """Compare bytes."""
        for number in wrong_blocks(blocks, keys):
            say(f"wrong {what}: block {number} of {keys[0].tobytes()[:4].hex()}")

    def store(self) -> None:
        keys = self.some_keys()
        self.tally["stored"] += self.client.store(self.space, keys, content_of(keys)).stored

    def fetch(self) -> None:
        keys = self.some_keys()
        found = self.client.fetch(self.space, keys)
        self.tally["fetched"] += found.count
        self.check("fetch", found.blocks[: found.count], keys)

    def hold(self) -> None:
        keys = self.some_keys()
        with self.client.acquire(self.space, keys, ttl_s=5) as lease:
            time.sleep(self.rng.random() * 0.02)
            out = np.empty((max(1, lease.count), SHAPE.block_bytes), np.uint8)
            good = lease.copy_to(out)
        self.tally["leased"] += good
        self.check("lease", out[:good], keys)

    def attend(self) -> None:
        keys = self.some_keys()
        count = self.client.lookup(self.space, keys).count
        if not count:
            return
        with self.client.open_sequence(self.space, keys[:count]) as sequence:
            layer = self.rng.randrange(SHAPE.layers)
            q = np.random.default_rng(self.rng.getrandbits(32)).standard_normal((1, 2, SHAPE.k_dim), np.float32)
            got = sequence.attend(layer, q)
        self.tally["attended"] += count
        blocks = content_of(keys[:count]).view(np.uint16).reshape(count, SHAPE.layers, 2, SHAPE.block_size, 1, -1)
        numbers = (blocks[:, layer].astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        parts = [(numbers[i, 0], numbers[i, 1], i * SHAPE.block_size) for i in range(count)]
        wanted, _ = reference_attention(
            q, parts, scale=SHAPE.k_dim**-0.5, v_dim=SHAPE.v_dim, position=count * SHAPE.block_size - 1
        )
        if (error := relative_error(got.output, wanted)) > ERROR_MAX:
            say(f"wrong attention: relative error {error} over {count} blocks")

    def prefetch(self) -> None:
        self.client.prefetch(self.space, self.some_keys(), tier=self.rng.choice(("host", "gpu")))

    def pin(self) -> None:
        keys = self.some_keys()
        self.tally["pinned"] += self.client.pin(self.space, keys)
        self.client.unpin(self.space, keys)

    def delete(self) -> None:
        self.tally["deleted"] += self.client.delete(self.space, self.some_keys())

    def write_and_abort(self) -> None:
        with self.client.reserve(self.space, self.some_keys()) as reservation:
            for view in reservation.views:
                if view is not None:
                    view[:] = 0xEE  # nobody may ever be served this

    def purge(self) -> None:
        self.client.purge(self.space, tiers=["host", "gpu"])

    def flush(self) -> None:
        self.client.flush()

    def run(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        tell_s = 0.0
        works, weights = list(self.works), list(self.works.values())
        while time.monotonic() < end_s:
            try:
                self.rng.choices(works, weights)[0]()
            except Unavailable:
                self.tally["unavailable"] += 1
            except RequestError as error:
                if error.code not in REFUSALS:
                    say(f"wrong answer: {error.code}: {error}")
                self.tally[error.code] += 1
            if time.monotonic() > tell_s:
                tell_s = time.monotonic() + TELL_EVERY_S
                self.tell()
        self.tell()

    def tell(self) -> None:
        """All that was done so far."""
        say(" ".join(["tally", *(f"{name} {count}" for name, count in sorted(self.tally.items()))]))


def main() -> None:
    """Work for the time given."""
    with Client(sys.argv[1], timeout_s=5, transfer_timeout_s=30) as client:
        Soak(client, int(sys.argv[2])).run(float(sys.argv[3]))


if __name__ == "__main__":
    main()
