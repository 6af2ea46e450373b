"""A client in a process of its own, driven line by line: run by the tests in this folder, never imported by them.

`python client_process.py ENDPOINT MODE …`. It prints one JSON line per step and waits for a line on stdin before the
next one, so that a test can kill or freeze it exactly there.
"""

from __future__ import annotations

import json
import random
import sys
import time

import numpy as np

from kvtierd import Client, Geometry, Namespace, block_keys

SHAPE = Geometry(block_size=128, layers=4, kv_heads=2, k_dim=128, v_dim=128)  # 512 KiB a block
SPACE = Namespace(model="integration", geometry=SHAPE)


def keys_of(prompt: int, blocks: int):
    """Keys of the first blocks of one of many prompts."""
    tokens = np.arange(blocks * SHAPE.block_size, dtype=np.uint32) + prompt * 1_000_003
    return block_keys(SPACE.digest(), tokens, SHAPE.block_size)


def content_of(keys) -> np.ndarray:
    """Blocks' bytes, made from their keys alone: every process knows what is right."""
    seeds = [int.from_bytes(key.tobytes()[:8], "little") for key in keys]
    rows = [np.random.default_rng(seed).integers(0, 256, SHAPE.block_bytes, np.uint8) for seed in seeds]
    return np.stack(rows)


def tell(**line: object) -> None:
    """Tell the test something."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def say(**line: object) -> None:
    """Tell the test, then wait for its word."""
    tell(**line)
    if not sys.stdin.readline():
        raise SystemExit(0)


def mixed_load(client: Client, seed: int, rounds: int) -> None:
    """Store and fetch at random; compare every byte."""
    space, rng = client.register(SPACE), random.Random(seed)
    tally = {"stored": 0, "fetched": 0, "wrong": 0}
    for _ in range(rounds):
        keys = keys_of(rng.randrange(16), rng.randint(1, 8))
        if rng.random() < 0.5:
            tally["stored"] += client.store(space, keys, content_of(keys)).stored
            continue
        found = client.fetch(space, keys)
        tally["fetched"] += found.count
        wrong = (found.blocks[: found.count] != content_of(keys)[: found.count]).any(axis=1) if found.count else []
        tally["wrong"] += int(np.sum(wrong))
    say(**tally)


def steps_of_a_store(client: Client, prompt: int) -> None:
    """Reserve, write, commit, one step at a time."""
    space, keys = client.register(SPACE), keys_of(prompt, 4)
    say(step="registered")
    reservation = client.reserve(space, keys)
    say(step="reserved", granted=sum(view is not None for view in reservation.views))
    blocks = content_of(keys)
    for view, block in zip(reservation.views, blocks, strict=True):
        if view is not None:
            view[:] = block
    say(step="written")
    reservation.commit()
    say(step="committed")


def steps_of_a_read(client: Client, prompt: int) -> None:
    """Acquire, copy, release, one step at a time; says whether what it copied may be used and is right."""
    space, keys = client.register(SPACE), keys_of(prompt, 4)
    say(step="registered")
    lease = client.acquire(space, keys, ttl_s=1.0)
    say(step="acquired", count=lease.count)
    out = np.empty((max(1, lease.count), SHAPE.block_bytes), np.uint8)
    good = lease.copy_to(out, verify=False)
    say(step="copied", good=good, right=bool((out[:good] == content_of(keys)[:good]).all()))
    lease.release()
    say(step="released")


def watch(client: Client, prompt: int) -> None:
    """Look up and fetch without a pause; tells of every change between hit and miss, and of slow or wrong answers."""
    space, keys = client.register(SPACE), keys_of(prompt, 4)
    truth, hit, worst_s, wrong = content_of(keys), True, 0.0, 0
    tell(step="watching")
    end_s = time.monotonic() + float(sys.argv[4])
    flips = []
    while time.monotonic() < end_s:
        begin_s = time.monotonic()
        found = client.fetch(space, keys, timeout_s=0.5)
        now_s = time.monotonic()
        worst_s = max(worst_s, now_s - begin_s)
        wrong += int(bool(found.count) and not (found.blocks[: found.count] == truth[: found.count]).all())
        if (found.count == 4) != hit:
            hit = not hit
            flips.append((hit, now_s))
        time.sleep(0.005)
    say(step="done", flips=flips, worst_s=worst_s, wrong=wrong)


def main() -> None:
    """Run a mode."""
    endpoint, mode = sys.argv[1:3]
    with Client(endpoint) as client:
        if mode == "mixed":
            mixed_load(client, int(sys.argv[3]), int(sys.argv[4]))
        elif mode == "store":
            steps_of_a_store(client, int(sys.argv[3]))
        elif mode == "read":
            steps_of_a_read(client, int(sys.argv[3]))
        else:
            watch(client, int(sys.argv[3]))


if __name__ == "__main__":
    main()
