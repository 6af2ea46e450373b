"""What the index does by itself, as numbers: for `kvtierctl bench index`, which adds the goals and the table.

Nothing here is on the daemon's path. Keys are random, as hashes are; every function takes the number of keys, so that
a small machine can run a small one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtierd.index.block_table import BlockTable
from kvtierd.index.layout import LINE_BYTES, Keys, Rows
from kvtierd.index.long_lookups import LongLookups
from kvtierd.index.memory import reserve
from kvtierd.index.page_table import PageTable

NAMESPACE = 7
ASKED_TO_SWITCH = 700
"""Times that a prefix is asked about: over what pays for tracking the shortest one."""
BATCH = 4096
"""Keys a call: a long prompt's. A call then costs little beside its lookups."""


@dataclasses.dataclass(frozen=True, slots=True)
class Growth:
    """What inserting block after block showed."""

    inserts_per_second: float
    pause_ms: float
    """Longest step (`alloc`, writing the keys and `insert` for one batch), each at its fastest of all replays."""
    pause_cpu_ms: float
    """The same in processor time of the thread: on a machine so busy that a step is interrupted in every replay."""
    pause_once_ms: float
    """Longest step of any replay: with whatever else had the processor meanwhile."""
    load_before_growth: float
    """Share of slots taken when growth last began."""
    searched_max: int
    """Most buckets that the search for one key's place looked at."""
    stashed_max: int
    refused: int


def filled(keys: Keys, capacity: int, secret: bytes | None = None) -> tuple[BlockTable, PageTable]:
    """A block table and a page table with `keys`, with room for `capacity` blocks."""
    blocks = BlockTable(capacity)
    pages = PageTable(blocks, secret)
    for begin in range(0, len(keys), BATCH):
        _insert(blocks, pages, keys[begin : begin + BATCH])
    return blocks, pages


def random_keys(count: int, seed: int) -> Keys:
    """`count` keys, [count, 32] uint8."""
    return np.random.default_rng(seed).integers(0, 256, (count, 32), np.uint8)


class LongBench:
    """Long prefixes looked up by their keys among `others` blocks: probed, and by way of the front."""

    def __init__(self, others: int, lengths: Sequence[int]) -> None:
        keys = random_keys(others, 5)
        blocks, self._pages = filled(keys, capacity=2 * others)
        self._long = LongLookups(blocks, self._pages)
        picked = np.random.default_rng(6).permutation(others)
        self._keys = {length: np.ascontiguousarray(keys[picked[:length]]) for length in lengths}
        self._scratch = np.ones(1 << 22, np.uint64)
        for prefix in self._keys.values():
            for _ in range(ASKED_TO_SWITCH):
                self._long.prefix(prefix, NAMESPACE)
        while self._long.front.step(1 << 12):
            pass

    def probed_ns(self, length: int) -> float:
        """A key, probed in the page table."""
        return self._timed_ns(length, lambda keys: self._pages.prefix(keys, NAMESPACE)[1])

    def answered_ns(self, length: int) -> float:
        """A key, by the front."""
        return self._timed_ns(length, lambda keys: self._long.prefix(keys, NAMESPACE))

    def _timed_ns(self, length: int, look_up: Callable[[Keys], Rows]) -> float:
        self._scratch += np.uint64(1)  # Whatever else a daemon does between two such lookups empties the caches.
        keys, begin = self._keys[length].copy(), time.perf_counter()
        found = look_up(keys)
        seconds = time.perf_counter() - begin
        if found.size != length:
            raise RuntimeError(f"{found.size} of {length} keys were found")
        return seconds * 1e9 / length


class LookupBench:
    """A table of `count` keys or a little more, 95% full, and `probes` keys to look up, `hit_share` of them in it."""

    def __init__(self, count: int, probes: int = 1 << 20, hit_share: float = 0.9, *, with_dict: bool = False) -> None:
        keys = random_keys(count + count // 5, 1)
        self.blocks, self.pages = filled(keys[:count], capacity=2 * count)
        keys = keys[: _fill_up(self.blocks, self.pages, keys)]
        self._probes = _probes(keys, probes, hit_share)
        self._hits = int((self.pages.lookup(self._probes, NAMESPACE) >= 0).sum())
        lines = len(keys) * self.bytes_per_block() / LINE_BYTES
        self._lines: npt.NDArray[np.uint64] = reserve((int(lines), LINE_BYTES // 8), np.uint64)
        self._lines[:] = 1  # Written, so that it has memory of its own and not the kernel's page of zeros.
        self._picked = np.random.default_rng(3).integers(0, len(self._lines), probes)
        self._dict: dict[bytes, int] = {key.tobytes(): row for row, key in enumerate(keys)} if with_dict else {}
        self._names = [key.tobytes() for key in self._probes[: probes // 4]] if with_dict else []

    def lookups_per_second(self) -> float:
        """Keys a second, on one core, whole key and namespace verified."""
        hits, begin = 0, time.perf_counter()
        for at in range(0, len(self._probes), BATCH):
            hits += int(np.count_nonzero(self.pages.lookup(self._probes[at : at + BATCH], NAMESPACE) >= 0))
        seconds = time.perf_counter() - begin
        if hits != self._hits:
            raise RuntimeError(f"{hits} of {self._hits} keys were found")
        return len(self._probes) / seconds

    def gathered_lines_per_second(self) -> float:
        """Cache lines a second that NumPy gathers at random from as much memory, one for each key looked up."""
        out = np.empty((BATCH, LINE_BYTES // 8), np.uint64)  # Small enough to stay in the cache.
        begin = time.perf_counter()
        for at in range(0, len(self._picked), BATCH):
            np.take(self._lines, self._picked[at : at + BATCH], axis=0, out=out[: len(self._picked) - at], mode="clip")
        return len(self._picked) / (time.perf_counter() - begin)

    def dict_lookups_per_second(self) -> float:
        """Keys a second of a Python dict with the same keys as bytes."""
        find, begin = self._dict.get, time.perf_counter()
        hits = sum(find(name) is not None for name in self._names)
        seconds = time.perf_counter() - begin
        if not hits or hits != int(
            np.count_nonzero(self.pages.lookup(self._probes[: len(self._names)], NAMESPACE) >= 0)
        ):
            raise RuntimeError(f"{hits} of {len(self._names)} keys were in the dict; was it made with with_dict=True?")
        return len(self._names) / seconds

    def bytes_per_block(self) -> float:
        """RAM per block, everything counted: record, checksum, free list, page table."""
        return self.blocks.bytes_per_block() + self.pages.bytes_per_block()


def _fill_up(blocks: BlockTable, pages: PageTable, keys: Keys) -> int:
    """Add keys until the table is about to grow, at 95%; returns how many are in. A growth makes room for a ninth."""
    while pages.stats()["load"] < 0.949:
        begin = len(pages)
        _insert(blocks, pages, keys[begin : begin + max(1, begin // 2048)])
        if len(pages) == begin:
            raise RuntimeError(f"{begin} keys fill {pages.stats()['load']:.3f} of the table")
    return len(pages)


def _insert(blocks: BlockTable, pages: PageTable, keys: Keys) -> None:
    rows = blocks.alloc(len(keys))
    blocks.key[rows], blocks.namespace[rows] = keys, NAMESPACE
    if (pages.insert(rows) != -1).any():
        raise RuntimeError(f"the page table refused one of {len(keys)} keys beside {len(pages)}")


def _probes(keys: Keys, count: int, hit_share: float) -> Keys:
    rng = np.random.default_rng(2)
    probes = keys[rng.integers(0, len(keys), count)]
    missing = rng.random(count) >= hit_share
    probes[missing] = rng.integers(0, 256, (int(missing.sum()), 32), np.uint8)
    return probes


def growth(start: int, end: int, batch: int = 32, replays: int = 3) -> Growth:
    """Grow from `start` to `end` blocks, `batch` at a time, in tables that could take as many again.

    Every replay does the same work with new memory: keys and secret are the same. A step that is slow in one of them
    only was slow for a reason outside.
    """
    keys = random_keys(end, 4)
    runs = [_grow(keys, start, batch) for _ in range(replays)]
    wall_ns, cpu_ns = (np.min([run[0][:, clock] for run in runs], axis=0) for clock in range(2))
    stats = runs[0][1]
    return Growth(
        inserts_per_second=(end - start) / (float(wall_ns.sum()) / 1e9),
        pause_ms=float(wall_ns.max()) / 1e6,
        pause_cpu_ms=float(cpu_ns.max()) / 1e6,
        pause_once_ms=max(float(run[0][:, 0].max()) for run in runs) / 1e6,
        load_before_growth=float(stats["load_before_growth"]),
        searched_max=int(stats["searched_max"]),
        stashed_max=int(stats["stashed_max"]),
        refused=int(stats["refused"]),
    )


def _grow(keys: Keys, start: int, batch: int) -> tuple[npt.NDArray[np.int64], dict[str, int | float]]:
    """One replay: nanoseconds of each step by wall and by processor ([steps, 2]), and the table's counters with the
    fullest stash on the way."""
    blocks, pages = filled(keys[:start], capacity=2 * len(keys), secret=b"growth, replayed")
    step_ns, stashed = [], 0
    for at in range(start, len(keys), batch):
        added = keys[at : at + batch]
        begin, cpu = time.perf_counter_ns(), time.thread_time_ns()
        rows = blocks.alloc(len(added))
        blocks.key[rows], blocks.namespace[rows] = added, NAMESPACE
        pages.insert(rows)
        cpu = time.thread_time_ns() - cpu
        step_ns.append((time.perf_counter_ns() - begin, cpu))
        stashed = max(stashed, int(pages.stats()["stashed"]))
    return np.array(step_ns), {**pages.stats(), "stashed_max": stashed}
