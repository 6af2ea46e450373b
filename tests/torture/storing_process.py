"""A client that stores, reads, deletes and flushes until it is killed, and says what it was promised.

`python -m tests.torture.storing_process ENDPOINT SEED FIRST_PROMPT`. Each line is one fact, written before anything
else happens: `begun P N` up to N blocks of prompt P may be found from now on, `flushed P:N …` these are durable,
`doomed P` it may be gone from now on, `deleted P` it is gone for good, `wrong P N` block N of P had other bytes.
A daemon that goes away and comes back costs promises, and no exception.
"""

from __future__ import annotations

import os
import random
import sys
import time

from kvtierd import Client
from kvtierd.core.errors import KvtierdError
from tests.torture.prompts import SPACE, content_of, keys_of, wrong_blocks

PROMPTS = 40
"""Of one process: it comes back to them."""
MOST_BLOCKS = 8
PAUSE_S = 0.002
"""After each step: what is written in one unit must fit into the store, which would else forget what was promised."""
LOSSES = ("offload_dropped_blocks", "nvme_reclaimed_blocks", "nvme_lost_in_sync", "offload_failed_blocks")


def say(*words: object) -> None:
    """One write: a line is whole or not there."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Load:
    """`held` is what was stored in the life of the daemon that `life` names."""

    def __init__(self, client: Client, seed: int, first: int) -> None:
        self.client = client
        self.space = client.register(SPACE)
        self.rng = random.Random(seed)
        self.prompts = range(first, first + PROMPTS)
        self.held: dict[int, int] = {}
        self.life = self.state()

    def state(self) -> tuple[int, ...]:
        """The daemon's process and what it has lost so far."""
        stats = self.client.stats()
        return (int(stats["daemon_pid"]), *(int(stats[name]) for name in LOSSES))

    def store(self) -> None:
        prompt, count = self.rng.choice(self.prompts), self.rng.randint(1, MOST_BLOCKS)
        say("begun", prompt, count)
        keys = keys_of(prompt, count)
        stored = self.client.store(self.space, keys, content_of(keys))
        if not stored.dropped:
            self.held[prompt] = max(count, self.held.get(prompt, 0))

    def read(self) -> None:
        prompt = self.rng.choice(self.prompts)
        keys = keys_of(prompt, MOST_BLOCKS)
        found = self.client.fetch(self.space, keys)
        for number in wrong_blocks(found.blocks[: found.count], keys):
            say("wrong", prompt, number)

    def delete(self) -> None:
        if not self.held:
            return
        prompt = self.rng.choice(list(self.held))
        del self.held[prompt]
        say("doomed", prompt)
        before = self.state()
        self.client.delete(self.space, keys_of(prompt, MOST_BLOCKS))
        self.client.flush()
        if self.state() == before:
            say("deleted", prompt)

    def flush(self) -> None:
        covered = dict(self.held)
        self.client.flush()
        now = self.state()
        if now == self.life:
            say("flushed", *(f"{prompt}:{count}" for prompt, count in covered.items()))
        else:  # some of it was stored in an earlier life, or was lost where that is counted
            self.held.clear()
            self.life = now

    def run(self) -> None:
        while True:
            try:
                self.rng.choices((self.store, self.read, self.delete, self.flush), (8, 4, 1, 2))[0]()
            except KvtierdError:
                time.sleep(0.05)
            time.sleep(PAUSE_S)


def main() -> None:
    """Work until killed."""
    endpoint, seed, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with Client(endpoint, timeout_s=2, transfer_timeout_s=20) as client:
        Load(client, seed, first).run()


if __name__ == "__main__":
    main()
