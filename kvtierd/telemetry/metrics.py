"""Every statistic of the daemon as one row: name, type, meaning. Names end in their unit; blocks and counts have none.

What the store counts (`nvme_…`) has its rows in kvtierd.storage.stats.

A counter only grows while the daemon lives; a gauge goes up and down; a text is what it says.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from kvtierd.core.errors import ErrorCode


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """One row."""

    name: str
    kind: Literal["counter", "gauge", "text"]
    meaning: str


_HOPS = (("gpu", "host"), ("host", "gpu"), ("host", "client"))
"""Ways between tiers that no store counts (kvtierd.tiers.speeds)."""

_MULTIPLES = ("1x", "1_25x", "1_5x", "2x", "4x")
"""Sizes that ghost hits are counted for (kvtierd.policy.ghosts), as they stand in names."""


_ROWS = (
    # Tiers
    Metric("host_capacity_bytes", "gauge", "size of the host tier"),
    Metric("host_ready_bytes", "gauge", "memory of the host tier that is there; the rest is being allocated"),
    Metric("host_used_bytes", "gauge", "slots in use in the host tier"),
    Metric("host_blocks", "gauge", "blocks with a copy in the host tier"),
    Metric("host_evicted_blocks", "counter", "copies dropped from the host tier to make room"),
    Metric("host_watermark_blocks", "counter", "of these, in the background because of host.watermark"),
    Metric("host_lost_blocks", "counter", "evicted blocks that had no other copy"),
    Metric("host_corrupt_blocks", "counter", "blocks in host memory that failed their checksum; they are dropped"),
    Metric("warm_adopted_blocks", "counter", "blocks that the life before had left in the host tier"),
    Metric("warm_verified_blocks", "counter", "of these, those that were found whole, before they were served"),
    Metric("warm_corrupt_blocks", "counter", "of these, those that did not match their checksum; they are dropped"),
    Metric("warm_unverified_blocks", "gauge", "of these, those that nobody has looked at yet"),
    Metric("warm_quarantined_slots", "gauge", "slots that clients of the life before may still write"),
    Metric("warm_refusal", "text", "why the memory of the life before was not used; empty where it was"),
    Metric("host_chunks_moved", "counter", "chunks of the arena given to another tenant or block size"),
    Metric("gpu_device", "text", "device of the gpu tier: host, cuda:N, or none"),
    Metric("gpu_capacity_bytes", "gauge", "size of the gpu tier"),
    Metric("gpu_used_bytes", "gauge", "slots in use in the gpu tier"),
    Metric("gpu_blocks", "gauge", "blocks with a copy in the gpu tier"),
    Metric("gpu_evicted_blocks", "counter", "copies dropped from the gpu tier to make room"),
    Metric("gpu_watermark_blocks", "counter", "of these, in the background because of gpu_watermark"),
    Metric("gpu_corrupt_blocks", "counter", "blocks of the gpu tier that failed their checksum; they are dropped"),
    Metric("nvme_blocks", "gauge", "blocks with a copy on disk"),
    Metric("offloaded_blocks", "counter", "blocks written behind to disk"),
    Metric("offloaded_bytes", "counter", "bytes of these, headers included"),
    Metric("offload_failed_blocks", "counter", "blocks that the disk refused; they stay in host only"),
    Metric("offload_deferred_blocks", "counter", "blocks that had to wait for room in the queue to the disk"),
    Metric("offload_pauses", "counter", "writes to nvme that waited because clients copied out of host memory"),
    Metric("offload_dropped_blocks", "counter", "deferred blocks that were evicted or deleted before there was room"),
    Metric("offloaded_again_bytes", "counter", "of offloaded_bytes, those of blocks that had been used again by then"),
    Metric("offload_not_admitted_blocks", "counter", "blocks not written because of nvme.admission, each time asked"),
    Metric("offload_over_budget_blocks", "counter", "blocks not written because of nvme.daily_write_budget"),
    Metric("offload_over_quota_blocks", "counter", "blocks not written because of their tenant's nvme_bytes"),
    Metric(
        "quota_dropped_blocks", "counter", "blocks on disk that were forgotten because of their tenant's nvme_bytes"
    ),
    Metric("offload_behind_hole_blocks", "counter", "blocks not written because the one before is not on disk"),
    Metric("write_budget_bytes", "gauge", "bytes that nvme.daily_write_budget allows to be written now; 0 without one"),
    Metric("nvme_unread_blocks", "counter", "copies on disk that went without ever having been read"),
    Metric("onboarded_bytes", "counter", "bytes onboarded from disk"),
    Metric("onboard_failed_blocks", "counter", "blocks that the disk could not read now; they may be read later"),
    Metric("onboard_corrupt_blocks", "counter", "blocks on disk that failed their checksum; they are dropped"),
    Metric("acquired_extents", "counter", "extents leased for reads of parts of blocks"),
    Metric("reshaped_parts", "counter", "extents made of a part of a block, by request or by the policy"),
    Metric("reshaped_merges", "counter", "extents made of several blocks, likewise"),
    Metric("gathered_blocks", "counter", "blocks gathered from other extents into a slot of their own"),
    Metric("reshapes_put_off", "counter", "changes that the policy wanted while blocks were held or room was short"),
    Metric("front_sequences", "gauge", "long sequences that the adaptive front knows"),
    Metric("front_sequences_moving", "gauge", "of these, those on their way to another scheme"),
    Metric("front_sequences_waiting", "gauge", "those that cannot be tracked for want of room"),
    Metric("front_positions_watched", "gauge", "blocks of sequences that are kept in a bitmap, in step"),
    Metric("front_switches_to_bitmap", "counter", "sequences that were worth tracking"),
    Metric("front_switches_to_cuckoo", "counter", "sequences that were so no more"),
    Metric("front_long_lookups", "counter", "prefixes of 640 keys and more that were looked up"),
    Metric("front_long_lookup_positions", "counter", "keys of these that were answered by their place in a sequence"),
    Metric("shapes_known_blocks", "gauge", "blocks whose uses are counted part by part"),
    Metric("shapes_extents", "gauge", "extents in host that are not one whole block"),
    Metric("expired_blocks", "counter", "blocks forgotten because nobody used them within their time to live"),
    Metric("table_evicted_blocks", "counter", "blocks on disk forgotten because max_blocks was reached"),
    Metric("nvme_reclaimed_blocks", "counter", "copies lost because their segment was recycled"),
    Metric("write_queue_bytes", "gauge", "bytes waiting to be written to disk"),
    Metric("nvme_to_host_queue_bytes", "gauge", "bytes asked of the disk that are not in host yet"),
    Metric("gpu_to_host_queue_bytes", "gauge", "likewise of gpu"),
    Metric("host_to_gpu_queue_bytes", "gauge", "bytes on their way into gpu"),
    *(
        Metric(f"{source}_to_{target}_moved_bytes", "counter", f"bytes copied from {source} to {target} by the daemon")
        for source, target in _HOPS
    ),
    *(
        Metric(
            f"{source}_to_{target}_moving_ns", "counter", f"time in which copies from {source} to {target} were made"
        )
        for source, target in _HOPS
    ),
    Metric("compressed_blocks", "counter", "blocks that became FP8 in host, each time"),
    Metric("compressed_in_bytes", "counter", "bytes of their exact form, padding included"),
    Metric("compressed_out_bytes", "counter", "bytes of their FP8 form, scales, errors and padding included"),
    Metric(
        "compress_put_off_blocks", "counter", "cold blocks left exact because there was no room for the smaller form"
    ),
    Metric("compress_failed_blocks", "counter", "blocks left exact because their bytes were damaged, or by a bug"),
    Metric("compressed_forms", "gauge", "blocks whose form in host is FP8 now"),
    Metric("compress_relative_l2_mean", "gauge", "mean relative L2 error of all groups encoded: head, K or V, layer"),
    Metric("compress_error_max", "gauge", "the largest error of an element over the largest magnitude of its group"),
    Metric("decompressed_blocks", "counter", "blocks decoded on their way to a reader"),
    Metric("decompressed_bytes", "counter", "bytes that these became"),
    # What clients did
    Metric("lookups", "counter", "lookup requests"),
    Metric("lookup_blocks", "counter", "keys asked for in them"),
    Metric("lookup_hit_blocks", "counter", "keys that were part of a prefix hit"),
    Metric("lookup_tokens", "counter", "tokens of these blocks"),
    Metric("hit_gpu_tokens", "counter", "tokens found whose fastest copy is in gpu"),
    Metric("hit_host_tokens", "counter", "tokens found whose fastest copy is in host"),
    Metric("hit_nvme_tokens", "counter", "tokens found that are on disk only"),
    Metric("acquired_blocks", "counter", "blocks leased to clients"),
    Metric("onboarded_blocks", "counter", "blocks brought into the host tier from another one"),
    Metric("prefetched_blocks", "counter", "blocks whose fetch began ahead of a reader, by the window or on demand"),
    Metric("prefetch_used_blocks", "counter", "of these, blocks that were in host when they were asked for"),
    Metric("prefetch_late_blocks", "counter", "of these, blocks that were still on their way when they were asked for"),
    Metric("prefetch_wasted_blocks", "counter", "of these, blocks that left host before anybody asked for them"),
    Metric("prefetch_cancelled_blocks", "counter", "blocks not fetched ahead because request or client went away"),
    Metric("prefetch_refused_blocks", "counter", "blocks not fetched ahead because only hotter ones could make room"),
    Metric("advised_lookups", "counter", "lookups that were told how much is worth loading"),
    Metric("advised_against_blocks", "counter", "hit blocks of these that are computed faster than loaded"),
    Metric("reserved_blocks", "counter", "slots lent for writing"),
    Metric("committed_blocks", "counter", "blocks that became visible"),
    Metric("committed_bytes", "counter", "payload of these"),
    Metric("aborted_blocks", "counter", "reserved blocks given back unwritten"),
    Metric("deleted_blocks", "counter", "blocks that clients deleted or purged"),
    Metric("busy_stores", "counter", "blocks refused for want of room"),
    Metric("busy_reads", "counter", "reads cut short because too many blocks were on their way"),
    Metric("thrash_refused_blocks", "counter", "blocks that got no place in host because it thrashed"),
    Metric("thrash_episodes", "counter", "how often a block size began to thrash in the host tier"),
    Metric("thrash_active_classes", "gauge", "block sizes that thrash in the host tier now"),
    Metric(
        "thrash_refetched_share", "gauge", "of blocks that needed a place, the share that had just lost it; the worst"
    ),
    # Attention
    Metric("opened_sequences", "counter", "sequences that clients opened"),
    Metric("expired_sequences", "counter", "of these, ended because nothing was asked of them for their time to live"),
    Metric("sequences", "gauge", "sequences that are open"),
    Metric("sequence_blocks", "gauge", "blocks of these, each as often as it is in one"),
    Metric("sequence_host_kept_bytes", "gauge", "slots in host that open sequences hold, each as often as it is held"),
    Metric("sequence_gpu_kept_bytes", "gauge", "likewise in gpu"),
    Metric("attend_requests", "counter", "requests for attention that were answered"),
    Metric("attend_failed", "counter", "requests for attention that were answered with an error"),
    Metric("attend_running", "gauge", "requests for attention being worked on"),
    Metric("attend_batches", "counter", "times that pieces of several requests for attention ran side by side"),
    Metric("attend_batched_pieces", "counter", "pieces of requests that ran so"),
    Metric("attend_ns", "counter", "nanoseconds that requests for attention took, each by itself"),
    Metric("attend_disk_ns", "counter", "of attention: nanoseconds in which parts were being read from nvme"),
    Metric("attend_copy_ns", "counter", "of attention: nanoseconds in which parts were being copied into reach"),
    Metric("attend_compute_ns", "counter", "of attention: nanoseconds in which a kernel computed or waited to"),
    Metric("attend_gpu_bytes", "counter", "KV that attention read in gpu slots"),
    Metric("attend_host_bytes", "counter", "KV that attention read in host slots"),
    Metric("attend_nvme_bytes", "counter", "KV that attention read from disk"),
    Metric("attend_wasted_bytes", "counter", "parts brought ahead for a layer that was not asked for, or too late"),
    Metric("attend_failed_parts", "counter", "parts of blocks that could not be read where they were looked for"),
    Metric("attend_staging_bytes", "gauge", "size of the staging ring"),
    Metric("attend_staging_used_bytes", "gauge", "of this, in use"),
    # How the cache is used
    Metric("heat_mean", "gauge", "mean heat of a sample of the blocks, in uses"),
    Metric("heat_max", "gauge", "largest heat in that sample"),
    Metric("heat_cold_share", "gauge", "share of that sample below kv_cache_config.compression.threshold"),
    *(
        row
        for tier in ("gpu", "host", "nvme")
        for row in (
            Metric(f"{tier}_ghost_accesses", "gauge", "blocks used since the start, for the following"),
            *(
                Metric(f"{tier}_ghost_hits_{multiple}", "gauge", f"of these, hits of an LRU tier {multiple} as large")
                for multiple in _MULTIPLES
            ),
        )
    ),
    Metric("nvme_to_host_bytes_per_s", "gauge", "speed of reads from disk, while there are some"),
    Metric("gpu_to_host_bytes_per_s", "gauge", "speed of copies out of the gpu tier, while there are some"),
    Metric("host_to_client_bytes_per_s", "gauge", "speed of copies out of host memory"),
    # The page table
    Metric("index_blocks", "gauge", "blocks in the page table"),
    Metric("index_buckets", "gauge", "its buckets"),
    Metric("index_load", "gauge", "share of its places in use"),
    Metric("index_load_before_growth", "gauge", "that share when it last began to grow"),
    Metric("index_stashed", "gauge", "blocks in its stash"),
    Metric("index_lookups", "gauge", "keys looked up"),
    Metric("index_buckets_touched_mean", "gauge", "buckets read for one key"),
    Metric("index_buckets_touched_max", "gauge", "the most for one key"),
    Metric("index_stash_probes", "gauge", "keys looked for in the stash too"),
    Metric("index_displaced", "gauge", "blocks moved to make room in a bucket"),
    Metric("index_splits", "gauge", "buckets split while growing"),
    Metric("index_refused", "gauge", "blocks that found no place"),
    Metric("index_searched_max", "gauge", "most buckets searched for one place"),
    # What clients hold
    Metric("leases", "gauge", "read leases now"),
    Metric("leases_expired", "counter", "leases that ended by time and not by release"),
    Metric("reservations", "gauge", "write reservations now"),
    Metric("quarantined_reservations", "gauge", "of these, kept only because their owner may still write"),
    Metric("quarantined_blocks", "counter", "blocks whose reservation outlived its time"),
    Metric("pinned_bytes", "gauge", "slots that pins hold"),
    Metric("namespaces", "gauge", "namespaces known"),
    # The server
    Metric("server_sessions", "gauge", "clients now"),
    Metric("server_sessions_opened_total", "counter", "sessions opened"),
    Metric("server_requests_total", "counter", "requests taken up"),
    Metric("server_received_bytes_total", "counter", "bytes of these, payload in frames included"),
    Metric("server_sent_bytes_total", "counter", "bytes of replies"),
    Metric("server_replies_dropped_total", "counter", "replies that their client did not take"),
    Metric("server_late_requests_total", "counter", "requests answered at their deadline before they ended"),
    Metric("server_arena_attached_total", "counter", "processes that attached to the arena"),
    Metric("server_arena_refused_total", "counter", "peers that the arena socket turned away"),
    Metric("server_arena_accept_errors_total", "counter", "connections to the arena socket that failed at once"),
    Metric("server_event_batches_total", "counter", "batches of KV events published"),
    *(
        Metric(f"server_errors_{code}_total", "counter", f"requests answered with the error {code}")
        for code in ErrorCode
    ),
    # The process
    Metric("daemon_version", "text", "version of the package"),
    Metric("daemon_pid", "gauge", "process id"),
    Metric("daemon_uptime_s", "gauge", "seconds since it was ready"),
    Metric("daemon_resident_bytes", "gauge", "resident memory of the process, mapped libraries included"),
    Metric("recovered_blocks", "counter", "blocks found on disk at start"),
    Metric("recovery_dropped_blocks", "counter", "extents not taken up at start: torn, corrupt or superseded"),
    Metric("memory_error", "text", "why the host tier is smaller than configured, or empty"),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _ROWS}
"""All rows by name."""
