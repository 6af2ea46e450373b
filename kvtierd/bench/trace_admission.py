"""What is written to nvme, and what is lost by writing less: a host tier of some size, and nvme that keeps everything.

A request's hits are the leading run of blocks that are in host or on nvme. All its blocks are in host after it, and the
admission policy says how many leading ones may be on nvme; the host tier knows of them and keeps them less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from kvtierd.bench.rows import Row, make_row
from kvtierd.bench.trace_file import Trace
from kvtierd.bench.trace_replay import SEED, Cache, block_keys64
from kvtierd.policy.admission import Admission, AdmitAll, SecondAccess
from kvtierd.policy.key_filter import KeyFilter
from kvtierd.policy.return_eviction import ReturnEviction
from kvtierd.policy.returns import ReturnModel

FILTER_A_BLOCK = 16
"""Keys that are remembered as used for each block of the host tier."""
HOST_BLOCKS = 10_000
WRITES_MAX, LOSS_MAX = 0.25, 0.09
"""Goals for the public conversation trace over a host tier of HOST_BLOCKS; of other sizes the figures are to know."""
_BLOCK_BYTES = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Hits and written blocks, as shares of all block accesses."""

    hits: float
    writes: float


def replay_admission(trace: Trace, host_blocks: int, admission: Admission) -> Outcome:
    """Replay a trace over both tiers."""
    longest = int(np.diff(trace.starts).max())
    model = ReturnModel(host_blocks, SEED)
    host = Cache(trace, host_blocks, ReturnEviction(host_blocks + longest, model, 1))
    keys = block_keys64(trace.unique)[trace.blocks]
    seen = KeyFilter(FILTER_A_BLOCK * host_blocks, SEED)
    on_nvme = np.zeros(trace.unique, np.bool_)
    hits = writes = 0
    bounds = trace.starts.tolist()
    for begin, end, now_ns in zip(bounds[:-1], bounds[1:], trace.time_ns.tolist(), strict=True):
        blocks, used = trace.blocks[begin:end], keys[begin:end]
        stored = on_nvme[blocks]
        found = int((stored | host.present(blocks)).cumprod().sum())
        hits += found
        host.request(blocks, model.observe(used, found, now_ns))
        admitted = admission.admit(seen.add(used), stored, _BLOCK_BYTES, now_ns)
        writes += int(np.count_nonzero(~stored[:admitted]))
        on_nvme[blocks[:admitted]] = True
        host.copied(blocks[:admitted])
    return Outcome(hits / trace.accesses, writes / trace.accesses)


def admission_rows(trace: Trace, host_blocks: int) -> Iterator[Row]:
    """Second access against admitting all."""
    everything = replay_admission(trace, host_blocks, AdmitAll())
    second = replay_admission(trace, host_blocks, SecondAccess())
    judged = host_blocks == HOST_BLOCKS
    name = f"{trace.name}: second-access admission, host {host_blocks:,} blocks"
    yield make_row(
        "trace", f"{name}: nvme writes an access", second.writes, "",
        goal=f"<= {WRITES_MAX}" if judged else "", reference_name=f"admitting all writes {everything.writes:.4f}",
    )  # fmt: skip
    yield make_row(
        "trace", f"{name}: hits lost", everything.hits - second.hits, "",
        goal=f"<= {LOSS_MAX}" if judged else "", reference_name=f"admitting all hits {everything.hits:.4f}",
    )  # fmt: skip
