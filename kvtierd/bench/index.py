"""`kvtierctl bench index`: the page table by itself, what it takes in memory, and the adaptive front on top.

What is compared: lookups of 4,096 keys a call in a table 95% full, nine of ten of them found, each by its whole key and
namespace, on one core. The first reference is NumPy gathering one 64-byte line at random for each of these keys from as
much memory as the table and its records take: what the memory of this machine gives without any table. The second is a
Python dict of the same keys as bytes. Growth is one insertion of 32 blocks after the other, each step at its fastest of
several replays of the same work: what is left is the table's own, not what else ran on the machine. Last come the
schemes of the adaptive front for sequences of several lengths in blocks of 64 tokens, probing the page table as the
reference, and what the choice between them is made of.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence

import numpy as np

from kvtierd.bench.options import Options, need_memory
from kvtierd.bench.rounds import alternate
from kvtierd.bench.rows import Row, make_row
from kvtierd.bench.smaps import total_bytes
from kvtierd.config.schema import Host
from kvtierd.core.geometry import Geometry
from kvtierd.core.units import GIB, PAGE_BYTES
from kvtierd.index.crossover import MEASURED, Scheme
from kvtierd.index.frontbench import BLOCK_TOKENS, RANGE_POSITIONS, FrontBench
from kvtierd.index.long_lookups import LONG_KEYS
from kvtierd.index.selfbench import LongBench, LookupBench, growth
from kvtierd.policy.return_eviction import ReturnEviction
from kvtierd.policy.returns import ReturnModel
from kvtierd.tiers.arena import Chunk
from kvtierd.tiers.host_tier import HostTier

SMALLEST = Geometry(block_size=64, layers=30, kv_heads=3, k_dim=64, v_dim=64)
"""SmolLM2-135M, the smallest model of the demonstrations, with the smallest block_size of the profiles (64 tokens of
23,040 bytes)."""
BLOCKS_A_CALL = 64
"""Blocks that become resident together: a prefix of 4,096 tokens."""
BYTES_A_KEY = 700
"""What the bench takes for one key at most: the table, the lines to gather, and the dict with its keys as bytes."""
LONG = (LONG_KEYS, 1024, 4096)
"""Keys of a lookup: as few as the front is asked about, up to as many as a request may have."""
_GATHER = "NumPy's random gather of a 64-byte line a key"
_DICT = "Python dict of bytes"
_USED = "what the front reckons with"


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    keys: int = 8_000_000
    rounds: int = 7
    grow_from: int = 1_000_000
    grow_to: int = 8_000_000
    replays: int = 5
    host_bytes: int = 16 * GIB
    others: int = 4_000_000
    """Blocks beside those of the sequences that the front is asked about."""
    front_rounds: int = 15
    tokens: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)


@dataclasses.dataclass(frozen=True, slots=True)
class SlotRam:
    """Bytes of RAM for each slot of the host tier: its columns and share of what lies beside a chunk; its sums."""

    columns: float
    sums: float


QUICK = Sizes(keys=2_000_000, rounds=3, grow_to=2_500_000, others=1_000_000, front_rounds=7)


def rows(options: Options) -> Iterator[Row]:
    """Measure everything."""
    sizes = QUICK if options.quick else Sizes()
    need_memory(sizes.keys * BYTES_A_KEY)
    yield from rows_of(sizes)


def rows_of(sizes: Sizes) -> Iterator[Row]:
    """Measure memory first, while the process is small; then lookups, then growth."""
    slot = slot_ram_bytes(sizes.host_bytes)
    bench = LookupBench(sizes.keys, with_dict=True)
    yield from _lookups(bench, sizes.rounds)
    yield from _memory(bench.bytes_per_block(), slot)
    del bench
    yield from _growth(sizes)
    yield from _long(LongBench(sizes.others, LONG), LONG, sizes.front_rounds)
    yield from _front(FrontBench(sizes.others, sizes.front_rounds), sizes.tokens)


def _lookups(bench: LookupBench, rounds: int) -> Iterator[Row]:
    measures = [bench.lookups_per_second, bench.gathered_lines_per_second, bench.dict_lookups_per_second]
    ours, lines, names = (figure / 1e6 for figure in alternate(measures, rounds))
    stats = bench.pages.stats()
    of = f"lookups of {stats['blocks'] / 1e6:.2g} M keys, load {stats['load']:.2f}, 90% hits"
    yield make_row("index", of, ours, "M keys/s", reference=lines, reference_name=_GATHER, goal=">= 0.22")
    yield make_row("index", of, ours, "M keys/s", reference=names, reference_name=_DICT, goal=">= 8")
    yield make_row("index", "buckets touched, mean", float(stats["buckets_touched_mean"]), "buckets")
    yield make_row("index", "buckets touched, max", float(stats["buckets_touched_max"]), "buckets", goal="<= 2")
    probes = stats["stash_probes"] / stats["lookups"]
    yield make_row("index", "lookups that looked at the stash or a second match", 100 * probes, "%")


def _memory(block_bytes: float, slot: SlotRam) -> Iterator[Row]:
    """`block_bytes` of the block and page table, `slot` of a slot in host, as the kernel counts them."""
    yield make_row("index", "RAM of a block in block table and page table", block_bytes, "bytes")
    yield make_row("index", "RAM of a slot in the host tier, resident: columns, policy, chunks", slot.columns, "bytes")
    yield make_row("index", "RAM of a slot's sums of layers, resident", slot.sums, "bytes")
    total = block_bytes + slot.columns
    yield make_row("index", "RAM of a block, everything but sums of layers", total, "bytes", goal="<= 160")
    share = 100 * (total + slot.sums) / SMALLEST.block_bytes
    yield make_row("index", "share of KV with sums, SmolLM2-135M, block_size 64", share, "%", goal="<= 0.1")


def slot_ram_bytes(capacity: int) -> SlotRam:
    """RAM that a host tier of `capacity` takes beside its blocks, for each of the smallest blocks it has room for.

    What the process holds afterwards, less what it held before: a tier under the default policy whose chunks are
    mapped, with their generation tables, but have no memory; cut into slots that are all in use, with layer sums. The
    policy's model of returns is left out: it is one for the daemon and has a size of its own, whatever the tier's.
    """
    settings, pid = Host(capacity=capacity), os.getpid()
    model = ReturnModel(capacity // SMALLEST.slot_bytes, seed=1)
    first = _full_tier(settings, model)
    total_bytes(pid)  # What is loaded once, and what the heap keeps of all this, is not a block's.
    first.close()
    before = total_bytes(pid)
    tier = _full_tier(settings, model)
    after = total_bytes(pid)
    cls = tier.pool.classes[0]
    slots = np.concatenate([tier.pool.slots_of(slab) for slab in cls.slabs])
    cls.sums[tier.pool.sum_rows(slots)] = 1
    with_sums = total_bytes(pid)
    tier.close()
    return SlotRam((after - before) / slots.size, (with_sums - after) / slots.size)


def _full_tier(settings: Host, model: ReturnModel) -> HostTier:
    tier = HostTier(settings, ReturnEviction(settings.capacity // PAGE_BYTES, model))
    for slab in reversed(tier.missing):
        tier.adopt(slab, Chunk(tier.new_number(), settings.chunk_bytes, allocate=False))
    tier.missing.clear()
    cls = tier.class_for(SMALLEST.slot_bytes, SMALLEST.layers, "bench")
    slots = tier.take_free(cls, tier.slabs_max * cls.slots_per_slab)
    for begin in range(0, slots.size, BLOCKS_A_CALL):
        some = slots[begin : begin + BLOCKS_A_CALL]
        tier.settle(cls, some, np.arange(begin, begin + some.size, dtype=np.int32))
    return tier


def _growth(sizes: Sizes) -> Iterator[Row]:
    grown = growth(sizes.grow_from, sizes.grow_to, replays=sizes.replays)
    of = f"growing from {sizes.grow_from / 1e6:.2g} M to {sizes.grow_to / 1e6:.2g} M keys"
    yield make_row("index", "load reached before growth", grown.load_before_growth, "", goal=">= 0.95")
    yield make_row("index", f"longest pause while {of}", grown.pause_ms, "ms", goal="<= 2")
    yield make_row("index", "the same in processor time", grown.pause_cpu_ms, "ms")
    yield make_row("index", f"longest step of any of {sizes.replays} replays", grown.pause_once_ms, "ms")
    yield make_row("index", f"insertions while {of}", grown.inserts_per_second / 1e6, "M keys/s")
    yield make_row("index", "keys refused meanwhile", float(grown.refused), "keys", goal="<= 0")


_MEASURES = (
    ("lookup_ns", "row of a position", "ns"),
    ("count_ns", "present in {span:,} positions", "ns"),
    ("extents_ns", "extents of {span:,} positions", "ns"),
    ("block_bytes", "RAM of a block", "bytes"),
    ("pause_ms", "longest pause while it grows", "ms"),
)
"""Figures of a scheme: field, what it is, unit."""
_COSTS = (
    ("probe_ns", "probing a position"),
    ("track_ns", "tracking a position"),
    ("begin_ns", "beginning to track"),
    ("update_ns", "a tracked block that comes or goes"),
)


def _long(bench: LongBench, lengths: Sequence[int], rounds: int) -> Iterator[Row]:
    """What the daemon's lookups of long prefixes gain by the front, keys compared and all."""
    for length in lengths:
        measures = [functools.partial(bench.answered_ns, length), functools.partial(bench.probed_ns, length)]
        ours, probed = alternate(measures, rounds)
        metric = f"lookup by {length:,} keys, through the front"
        yield make_row("index", metric, ours, "ns/key", reference=probed, reference_name="page table")


def _front(bench: FrontBench, lengths: Sequence[int]) -> Iterator[Row]:
    """The three schemes side by side, probing as the reference; then the costs that the front's choice is made of."""
    for tokens in lengths:
        figures = bench.figures(tokens)
        span = min(RANGE_POSITIONS, tokens // BLOCK_TOKENS)
        for field, measure, unit in _MEASURES:
            what, probed = measure.format(span=span), getattr(figures[Scheme.CUCKOO], field)
            yield make_row("index", f"front, {tokens:,} tokens, cuckoo: {what}", probed, unit)
            for scheme in (Scheme.BITMAP, Scheme.HYBRID):
                metric = f"front, {tokens:,} tokens, {scheme.name.lower()}: {what}"
                value = getattr(figures[scheme], field)
                yield make_row("index", metric, value, unit, reference=probed, reference_name="cuckoo")
    costs = bench.costs(lengths[-1])
    for field, what in _COSTS:
        used = getattr(MEASURED, field)
        value = getattr(costs, field)
        yield make_row("index", f"front, cost of {what}", value, "ns", reference=used, reference_name=_USED)
    for tokens in lengths:
        positions = tokens // BLOCK_TOKENS
        questions = costs.price_ns(positions) / (costs.probe_ns * min(positions, RANGE_POSITIONS))
        yield make_row("index", f"front, {tokens:,} tokens: questions until tracking has paid", questions, "questions")
