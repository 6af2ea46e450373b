"""Every statistic of the daemon as one row: name, type, meaning. Names end in their unit; blocks and counts have none.

A counter only grows while the daemon lives; a gauge goes up and down; a text is what it says.
"""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """One row."""

    name: str
    kind: Literal["counter", "gauge", "text"]
    meaning: str


_ROWS = (
    # Tiers
    Metric("host_capacity_bytes", "gauge", "size of the host tier"),
    Metric("host_ready_bytes", "gauge", "memory of the host tier that is there; the rest is being allocated"),
    Metric("host_used_bytes", "gauge", "slots in use in the host tier"),
    Metric("host_blocks", "gauge", "blocks with a copy in the host tier"),
    Metric("host_evicted_blocks", "counter", "copies dropped from the host tier to make room"),
    Metric("host_lost_blocks", "counter", "evicted blocks that had no other copy"),
    Metric("host_corrupt_blocks", "counter", "blocks in host memory that failed their checksum; they are dropped"),
    Metric("host_chunks_moved", "counter", "chunks of the arena given to another tenant or block size"),
    Metric("gpu_device", "text", "device of the gpu tier: host, cuda:N, or none"),
    Metric("gpu_capacity_bytes", "gauge", "size of the gpu tier"),
    Metric("gpu_used_bytes", "gauge", "slots in use in the gpu tier"),
    Metric("gpu_blocks", "gauge", "blocks with a copy in the gpu tier"),
    Metric("gpu_evicted_blocks", "counter", "copies dropped from the gpu tier to make room"),
    Metric("gpu_corrupt_blocks", "counter", "blocks of the gpu tier that failed their checksum; they are dropped"),
    Metric("nvme_blocks", "gauge", "blocks with a copy on disk"),
    Metric("nvme_written_blocks", "counter", "blocks written behind to disk"),
    Metric("nvme_written_bytes", "counter", "bytes of these, headers included"),
    Metric("nvme_failed_writes", "counter", "blocks that the disk refused; they stay in host only"),
    Metric("nvme_dropped_stores", "counter", "blocks not written because the queue to the disk was full"),
    Metric("nvme_read_bytes", "counter", "bytes onboarded from disk"),
    Metric("nvme_reclaimed_blocks", "counter", "copies lost because their segment was recycled"),
    Metric("write_queue_bytes", "gauge", "bytes waiting to be written to disk"),
    # What clients did
    Metric("lookups", "counter", "lookup requests"),
    Metric("lookup_blocks", "counter", "keys asked for in them"),
    Metric("lookup_hit_blocks", "counter", "keys that were part of a prefix hit"),
    Metric("acquired_blocks", "counter", "blocks leased to clients"),
    Metric("onboarded_blocks", "counter", "blocks brought into the host tier from another one"),
    Metric("reserved_blocks", "counter", "slots lent for writing"),
    Metric("committed_blocks", "counter", "blocks that became visible"),
    Metric("committed_bytes", "counter", "payload of these"),
    Metric("aborted_blocks", "counter", "reserved blocks given back unwritten"),
    Metric("deleted_blocks", "counter", "blocks that clients deleted or purged"),
    Metric("busy_stores", "counter", "blocks refused for want of room"),
    Metric("busy_reads", "counter", "reads cut short because too many blocks were on their way"),
    # What clients hold
    Metric("leases", "gauge", "read leases now"),
    Metric("leases_expired", "counter", "leases that ended by time and not by release"),
    Metric("reservations", "gauge", "write reservations now"),
    Metric("quarantined_reservations", "gauge", "of these, kept only because their owner may still write"),
    Metric("quarantined_blocks", "counter", "blocks whose reservation outlived its time"),
    Metric("pinned_bytes", "gauge", "slots that pins hold"),
    Metric("namespaces", "gauge", "namespaces known"),
    # Life
    Metric("recovered_blocks", "counter", "blocks found on disk at start"),
    Metric("recovery_dropped_blocks", "counter", "extents not taken up at start: torn, corrupt or superseded"),
    Metric("memory_error", "text", "why the host tier is smaller than configured, or empty"),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _ROWS}
"""All rows by name."""
