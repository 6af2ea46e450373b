"""Every metric that Prometheus sees: which statistics make it up, under which labels.

A statistic that no family here names gets one of its own, named after it, so that none is forgotten. docs/METRICS.md
is made of this table: `python -m kvtierd.daemon.families >docs/METRICS.md`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from kvtierd.core.errors import ErrorCode
from kvtierd.daemon.tenant_metrics import LABELS
from kvtierd.policy.ghosts import MULTIPLES
from kvtierd.storage import stats as store
from kvtierd.telemetry.metrics import METRICS, Metric
from kvtierd.telemetry.prometheus import Family, Kind, Labels, Value
from kvtierd.tiers.demand import ghost_metric

NS = 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class Sources:
    """A family and the statistics in it, each with its labels; `scale` turns their unit into the family's."""

    family: Family
    labels: Mapping[str, Labels]
    scale: float = 1
    less: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What is counted in another statistic of the family too, and to be taken off here."""
    texts: bool = False
    """The statistics are texts: each becomes a label `value` of a sample that is 1."""


def _tiers(template: str, *tiers: str) -> dict[str, Labels]:
    return {template.format(tier): {"tier": tier} for tier in tiers or ("gpu", "host", "nvme")}


def _moves(**names: str) -> dict[str, Labels]:
    """`host_to_nvme="statistic"`."""
    return {name: dict(zip(("source", "destination"), move.split("_to_"), strict=True)) for move, name in names.items()}


_TABLE = (
    # Tiers
    Sources(Family("tier_capacity_bytes", "gauge", "bytes", "size of a tier"), _tiers("{}_capacity_bytes")),
    Sources(Family("tier_used_bytes", "gauge", "bytes", "what a tier holds"), _tiers("{}_used_bytes")),
    Sources(
        Family("tier_blocks", "gauge", "blocks", "blocks with a copy in a tier; one can be in several"),
        _tiers("{}_blocks"),
    ),
    Sources(
        Family("evicted_blocks_total", "counter", "blocks", "copies dropped from a tier, and why"),
        {
            "gpu_evicted_blocks": {"tier": "gpu", "reason": "room"},
            "gpu_watermark_blocks": {"tier": "gpu", "reason": "watermark"},
            "host_evicted_blocks": {"tier": "host", "reason": "room"},
            "host_watermark_blocks": {"tier": "host", "reason": "watermark"},
            "nvme_reclaimed_blocks": {"tier": "nvme", "reason": "room"},
            "nvme_lost_in_sync": {"tier": "nvme", "reason": "sync"},
            "table_evicted_blocks": {"tier": "nvme", "reason": "max_blocks"},
            "quota_dropped_blocks": {"tier": "nvme", "reason": "quota"},
        },
        less={"gpu_evicted_blocks": "gpu_watermark_blocks", "host_evicted_blocks": "host_watermark_blocks"},
    ),
    Sources(
        Family("checksum_errors_total", "counter", "", "blocks whose bytes were not what was stored; they are dropped"),
        {
            "gpu_corrupt_blocks": {"tier": "gpu"},
            "host_corrupt_blocks": {"tier": "host"},
            "onboard_corrupt_blocks": {"tier": "nvme"},
        },
    ),
    # Transfers
    Sources(
        Family("transferred_bytes_total", "counter", "bytes", "bytes moved, by where from and where to"),
        _moves(
            client_to_host="committed_bytes",
            host_to_client="host_to_client_moved_bytes",
            host_to_nvme="nvme_stored_bytes",
            nvme_to_host="nvme_read_bytes",
            host_to_gpu="host_to_gpu_moved_bytes",
            gpu_to_host="gpu_to_host_moved_bytes",
        ),
    ),
    Sources(
        Family("transfer_seconds_total", "counter", "seconds", "time in which bytes were on this way"),
        _moves(
            host_to_client="host_to_client_moving_ns",
            host_to_nvme="nvme_write_ns",
            nvme_to_host="nvme_read_ns",
            host_to_gpu="host_to_gpu_moving_ns",
            gpu_to_host="gpu_to_host_moving_ns",
        ),
        NS,
    ),
    Sources(
        Family("transfer_queue_bytes", "gauge", "bytes", "bytes waiting to be moved"),
        _moves(
            host_to_nvme="write_queue_bytes",
            nvme_to_host="nvme_to_host_queue_bytes",
            gpu_to_host="gpu_to_host_queue_bytes",
            host_to_gpu="host_to_gpu_queue_bytes",
        ),
    ),
    Sources(
        Family("nvme_writes_bytes_total", "counter", "bytes", "bytes written to the disk, and what for"),
        {
            "nvme_stored_bytes": {"cause": "blocks"},
            "nvme_rewritten_bytes": {"cause": "rewriting"},
            "nvme_overhead_bytes": {"cause": "records"},
            "nvme_header_bytes": {"cause": "segment_headers"},
            "nvme_journal_bytes": {"cause": "journal"},
            "nvme_checkpoint_bytes": {"cause": "checkpoints"},
        },
    ),
    Sources(
        Family("admission_rejected_blocks_total", "counter", "blocks", "blocks not written to the disk, and why"),
        {
            "offload_not_admitted_blocks": {"reason": "admission"},
            "offload_over_budget_blocks": {"reason": "budget"},
            "offload_over_quota_blocks": {"reason": "quota"},
            "offload_behind_hole_blocks": {"reason": "hole"},
            "offload_dropped_blocks": {"reason": "queue"},
            "offload_failed_blocks": {"reason": "error"},
        },
    ),
    Sources(
        Family("prefetched_blocks_total", "counter", "blocks", "blocks fetched ahead, and what became of them"),
        {
            "prefetched_blocks": {"outcome": "begun"},
            "prefetch_used_blocks": {"outcome": "used"},
            "prefetch_late_blocks": {"outcome": "late"},
            "prefetch_wasted_blocks": {"outcome": "wasted"},
            "prefetch_cancelled_blocks": {"outcome": "cancelled"},
            "prefetch_refused_blocks": {"outcome": "refused"},
        },
    ),
    Sources(
        Family("compressed_blocks_total", "counter", "blocks", "cold blocks taken up to be compressed, by outcome"),
        {
            "compressed_blocks": {"outcome": "fp8"},
            "compress_put_off_blocks": {"outcome": "put_off"},
            "compress_failed_blocks": {"outcome": "failed"},
        },
    ),
    Sources(
        Family("compressed_bytes_total", "counter", "bytes", "bytes of compressed blocks, before and after"),
        {"compressed_in_bytes": {"form": "exact"}, "compressed_out_bytes": {"form": "fp8"}},
    ),
    Sources(
        Family("ghost_accesses", "gauge", "", "blocks used since the start, as the ghosts of each tier count them"),
        _tiers("{}_ghost_accesses"),
    ),
    Sources(
        Family("ghost_hits", "gauge", "", "of these, hits of an LRU tier so many times as large"),
        {
            ghost_metric(tier, times): {"tier": tier, "size": f"{times:g}"}
            for tier in ("gpu", "host", "nvme")
            for times in MULTIPLES
        },
    ),
    # What clients do and hold
    Sources(
        Family("lookup_tokens_total", "counter", "tokens", "tokens of the blocks that lookups asked for"),
        {"lookup_tokens": {}},
    ),
    Sources(
        Family("hit_tokens_total", "counter", "tokens", "of these, tokens found, by the fastest tier that has them"),
        _tiers("hit_{}_tokens"),
    ),
    Sources(
        Family("leases", "gauge", "", "read leases and write reservations that clients hold"),
        {
            "leases": {"kind": "read"},
            "reservations": {"kind": "write"},
            "quarantined_reservations": {"kind": "quarantined"},
        },
    ),
    Sources(
        Family("request_errors_total", "counter", "", "requests answered with an error, by its code"),
        {f"server_errors_{code}_total": {"code": str(code)} for code in ErrorCode},
    ),
    Sources(Family("requests_total", "counter", "", "requests taken up"), {"server_requests_total": {}}),
    # Attention
    Sources(
        Family("attention_requests_total", "counter", "", "requests for attention, by whether they were answered"),
        {"attend_requests": {"outcome": "answered"}, "attend_failed": {"outcome": "refused"}},
    ),
    Sources(
        Family("attention_seconds_total", "counter", "seconds", "time of all requests for attention"),
        {"attend_ns": {}},
        NS,
    ),
    Sources(
        Family("attention_busy_seconds_total", "counter", "seconds", "time of attention's parts, which overlap"),
        {
            "attend_disk_ns": {"part": "disk"},
            "attend_copy_ns": {"part": "copy"},
            "attend_compute_ns": {"part": "compute"},
        },
        NS,
    ),
    Sources(
        Family("attention_kv_bytes_total", "counter", "bytes", "KV that attention was computed over, by where it lay"),
        _tiers("attend_{}_bytes"),
    ),
    Sources(
        Family("sequence_kept_bytes", "gauge", "bytes", "slots that open sequences hold"),
        _tiers("sequence_{}_kept_bytes", "gpu", "host"),
    ),
    # What is there
    Sources(
        Family("nvme_mode", "gauge", "", "how bytes reach the disk: 1 for the mode in use"),
        {"nvme_mode": {}},
        texts=True,
    ),
    Sources(
        Family("gpu_device", "gauge", "", "device of the gpu tier: 1 for the one in use"),
        {"gpu_device": {}},
        texts=True,
    ),
    Sources(Family("build_info", "gauge", "", "version of the package: 1"), {"daemon_version": {}}, texts=True),
)

ABSENCE_SECONDS = Family(
    "host_absence_seconds", "histogram", "seconds", "time from losing its copy in host to being wanted there again"
)
REQUEST_SECONDS = Family("request_seconds", "histogram", "seconds", "time from taking up a request to its answer")
BLOCK_STATES = Family("block_states", "gauge", "", "blocks by state: clean ones are on disk too, dirty ones are not")


def rows() -> dict[str, Metric]:
    """Every statistic by name, those of the store with its prefix."""
    counters = (Metric(f"nvme_{name}", "counter", meaning) for name, meaning in store.COUNTERS.items())
    gauges = (
        Metric(f"nvme_{name}", "text" if name in store.TEXTS else "gauge", meaning)
        for name, meaning in store.GAUGES.items()
    )
    return {**METRICS, **{row.name: row for row in (*counters, *gauges)}}


@functools.cache
def sources() -> tuple[Sources, ...]:
    """All families: those above, and one for each statistic that none of them names."""
    named = {name for entry in _TABLE for name in entry.labels}
    return (*_TABLE, *(_own_family(row) for name, row in rows().items() if name not in named))


def collect(stats: Mapping[str, Any]) -> Iterator[tuple[Family, list[tuple[Labels, Value]]]]:
    """Families with the samples that these statistics give."""
    for entry in sources():
        found: list[tuple[Labels, Value]] = []
        for name, labels in entry.labels.items():
            if (value := stats.get(name)) is None:
                continue
            if (entry.texts and not value) or (not entry.texts and isinstance(value, str)):
                continue  # nothing to say, or a number that is not known yet
            if entry.texts:
                found.append(({**labels, "value": str(value)}, 1))
            else:
                value -= stats.get(entry.less.get(name, ""), 0)
                found.append((labels, value * entry.scale if entry.scale != 1 else value))
        yield entry.family, found


def document() -> str:
    """docs/METRICS.md."""
    lines = [_HEAD]
    for family, labels in _documented():
        unit = family.unit or "number"
        lines.append(
            f"| `{family.full_name}` | {family.kind} | {unit} | {', '.join(labels) or ' '} | {family.meaning} |"
        )
    return "\n".join(lines) + "\n"


def _documented() -> Iterator[tuple[Family, list[str]]]:
    yield REQUEST_SECONDS, ["operation"]
    yield ABSENCE_SECONDS, []
    yield BLOCK_STATES, ["tier", "state"]
    yield from ((family, list(labels)) for family, labels in LABELS.items())
    for entry in sources():
        labels = list(dict.fromkeys(label for labels in entry.labels.values() for label in labels))
        yield entry.family, [*labels, "value"] if entry.texts else labels


def _own_family(row: Metric) -> Sources:
    """A statistic on its own: base units, and `_total` for what only grows."""
    name, unit, scale = row.name.removesuffix("_total"), "", 1.0
    if found := re.search(r"_(bytes|blocks|ns|s|ratio|share)(_total)?$", row.name):
        name = name.removesuffix(f"_{found[1]}")
        unit, scale = {"ns": ("seconds", NS), "s": ("seconds", 1.0), "share": ("ratio", 1.0)}.get(
            found[1], (found[1], 1.0)
        )
        if name.endswith("_per"):
            name, unit = f"{name}_second", "bytes/second"
        else:
            name = f"{name}_{unit}"
    kind: Kind = "counter" if row.kind == "counter" else "gauge"
    family = Family(f"{name}_total" if kind == "counter" else name, kind, unit, row.meaning)
    return Sources(family, {row.name: {}}, scale, texts=row.kind == "text")


_HEAD = """\
# Metrics

`http://127.0.0.1:9464/metrics` (`metrics.listen`) in Prometheus' text format; `/healthz` is 200 while the loop and the
threads get on, `/readyz` while clients are served, and `/` is a page for people. Counters start at 0 with the process.
Those with the label `tenant` are there unless `metrics.tenants` is false, and always on the operators' socket.
This file is made of `kvtierd/daemon/families.py`, and a test compares the two. Dashboard and alert rules:
`systemd/grafana.json`, `systemd/alerts.yaml`.

| metric | type | unit | labels | meaning |
|---|---|---|---|---|"""


if __name__ == "__main__":
    sys.stdout.write(document())
