"""Traces of workloads that the public ones do not show, made from a seed: what a policy must not be tuned away from.

Each is a sequence of prompts that grow, share, repeat or never come back, with times. They are small: they show what a
policy knows, and not how a service feels.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from kvtierd.bench.trace_file import SECOND_NS, Trace, make_trace

Request = tuple[int, Sequence[str]]


def _zipf(rng: np.random.Generator, count: int, exponent: float, size: int) -> list[int]:
    """`size` draws of 0..count-1 with popularity rank ** -exponent, ranks in random order."""
    weight = np.arange(1, count + 1) ** -exponent
    draws: list[int] = rng.permutation(count)[rng.choice(count, size, p=weight / weight.sum())].tolist()
    return draws


def _arrivals(rng: np.random.Generator, count: int, rate: float) -> list[int]:
    times: list[int] = (np.cumsum(rng.exponential(1 / rate, count)) * SECOND_NS).astype(np.int64).tolist()
    return times


def _grown(rng: np.random.Generator, path: list[str], name: str, mean: float) -> list[str]:
    return path + [f"{name}.{i}" for i in range(int(rng.geometric(1 / mean)))]


def chat(rng: np.random.Generator, requests: int, think_s: float, stay: float = 0.6) -> list[Request]:
    """Conversations behind a system prompt: turns come after a think time whose scale is the user's own."""
    made: list[Request] = []
    for user, begin in enumerate(_arrivals(rng, requests, 3 * (1 - stay))):
        if len(made) >= requests:
            break
        time, pace, keeps = float(begin), think_s * np.exp(rng.normal(0, 0.5)), rng.beta(3 * stay, 3 * (1 - stay))
        path = _grown(rng, ["sys"], f"u{user}", 12)
        for turn in range(50):
            made.append((int(time), [*path, f"u{user}.part{turn}"]))
            if rng.random() > keeps:
                break
            time += pace * np.exp(rng.normal(0, 0.9)) * SECOND_NS
            path = _grown(rng, path, f"u{user}.{turn}", 3)
    return made


def documents(rng: np.random.Generator, requests: int) -> list[Request]:
    """Questions about documents of Zipf popularity, each question once."""
    lengths = rng.integers(3, 40, 1500)
    made: list[Request] = []
    for i, (time, doc) in enumerate(zip(_arrivals(rng, requests, 5), _zipf(rng, 1500, 0.8, requests), strict=True)):
        path = ["sys", *(f"d{doc}.{k}" for k in range(lengths[doc]))]
        made.append((time, [*path, *(f"q{i}.{k}" for k in range(rng.integers(1, 3)))]))
    return made


def agents(rng: np.random.Generator, requests: int, sessions: int = 60) -> list[Request]:
    """Tool loops: few sessions at a time, steps of some seconds, one of six long tool prompts before each."""
    queue = [(float(rng.exponential(5)), i) for i in range(sessions)]
    heapq.heapify(queue)
    paths: dict[int, list[str]] = {}
    made: list[Request] = []
    while len(made) < requests:
        time, session = heapq.heappop(queue)
        if session not in paths or rng.random() < 0.05:
            tool = rng.integers(6)
            paths[session] = _grown(rng, [f"t{tool}.{k}" for k in range(12)], f"s{len(made)}", 4)
        else:
            paths[session] = _grown(rng, paths[session], f"s{len(made)}", 2)
        made.append((int(time * SECOND_NS), [*paths[session], f"part{len(made)}"]))
        heapq.heappush(queue, (time + 3 * float(np.exp(rng.normal(0, 0.7))), session))
    return made


def repeats(rng: np.random.Generator, requests: int) -> list[Request]:
    """Whole prompts asked again and again, of Zipf popularity."""
    lengths = rng.geometric(0.1, 6000)
    drawn = zip(_arrivals(rng, requests, 5), _zipf(rng, 6000, 0.9, requests), strict=True)
    return [(time, [f"p{prompt}.{k}" for k in range(lengths[prompt])]) for time, prompt in drawn]


def scans(rng: np.random.Generator, requests: int) -> list[Request]:
    """Long prompts that never come back, between repeats."""
    part = requests // 10
    long = [
        (time, [f"scan{i}.{k}" for k in range(int(rng.geometric(1 / 60)))])
        for i, time in enumerate(_arrivals(rng, part, 0.5))
    ]
    return long + repeats(rng, requests - part)


MAKERS: dict[str, Callable[[np.random.Generator, int], list[Request]]] = {
    "chat, 20 s between turns": lambda rng, n: chat(rng, n, 20),
    "chat, 600 s between turns": lambda rng, n: chat(rng, n, 600),
    "documents": documents,
    "agents": agents,
    "repeats": repeats,
    "repeats and scans": scans,
}


def synthetic_traces(requests: int, seed: int = 1) -> list[Trace]:
    """One trace of each kind with about as many requests; the same ones for the same seed."""
    return [make_trace(name, make(np.random.default_rng(seed), requests)) for name, make in MAKERS.items()]
