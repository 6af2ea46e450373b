"""The benches by name. A bench is imported when it runs, so that one that wants torch stops no other."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from kvtierd.bench.options import Options
from kvtierd.bench.rows import Row

BENCHES: dict[str, str] = {
    "protocol": "lookups of 32 keys against a bare pyzmq asyncio echo",
    "host": "2 MiB blocks through the arena against plain copies",
    "nvme": "2 MiB blocks offloaded and onboarded against fio",
    "recovery": "a start on 100,000 blocks: clean, after kill -9, and by a scan of all headers",
    "space": "write amplification of a full store under Zipf-distributed reuse",
    "checksum": "share of the time that verifying takes at full read speed",
    "prefetch": "a cold sequential read with the prefetch window against one without",
    "index": "the page table against bare memory and a dict; its memory and pauses; the adaptive front",
    "trace": "hits of the default eviction policy on a trace (FILE) against six others and the bound",
    "codec": "FP8 with scales and errors against torch's casts and a copy (wants torch)",
    "attention": "attention over 64k tokens of bf16 and FP8 blocks against torch and a plain read (wants torch)",
    "accuracy": "the attention kernels against float64 over many shapes; what FP8 costs a real model (wants torch)",
    "attend": "attention over 256k tokens in three tiers against the disk and the kernel alone",
    "stress": "a long context through small tiers, exact and FP8, against copies, the disk and the kernel alone",
    "offloaded": "a decode step of a real model over an offloaded past against the disk (wants torch)",
    "overhead": "lookups while metrics, slow log and a watcher look on, against without",
    "restart": "a restart and a kill -9 with a full host tier that outlives the daemon",
    "flood": "lookups while another client sends garbage at full rate, against quiet",
    "naive": "decoding against contiguous KV: whole-context copies, partial residency, growth by reallocation",
    "sweep": "block sizes and prefetch windows under the four profiles, each with its own kind of load",
    "memory": "share of the memory taken that holds KV, against contiguous allocation",
    "peers": "the same stores and loads by LMCache, Mooncake and a plain copy, where installed (make bench-peers)",
    "start": "spawn to ready, and resident memory",
    "vllm": "first tokens and steps of vLLM with the connector against without (wants vLLM)",
    "lmcache": "LMCache's L2 bench on our adapter against its fs adapter (wants LMCache)",
    "demo": "time to first token of a real model against its cold prefill (wants the extra `demo`)",
}
"""Name and what is compared."""

PARTS: dict[str, tuple[str, ...]] = {
    "naive": ("residency", "whole-context", "growth"),
    "sweep": ("ultra-long", "high-concurrency", "bandwidth-limited", "compute-rich"),
}
"""Of benches that take minutes: what can be run alone, so that a report of them can be made in pieces."""


def run_bench(name: str, options: Options) -> Iterator[Row]:
    """Run one bench; rows come as they are measured. Raises BenchError where it cannot run here,
    ValueError for a bench or a part of one that there is not."""
    if name not in BENCHES:
        raise ValueError(f"{name!r} is no bench; there are {', '.join(BENCHES)}")
    if unknown := [part for part in options.only if part not in PARTS.get(name, ())]:
        raise ValueError(f"{unknown[0]!r} is no part of bench {name}, which has {', '.join(PARTS.get(name, ['none']))}")
    module = importlib.import_module(f"kvtierd.bench.{name}")
    rows: Iterator[Row] = module.rows(options)
    return rows
