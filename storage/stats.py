"""What the store tells about itself: one row per statistic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvtierd.storage.interface import IoMode
from kvtierd.storage.ring import Ring

COUNTERS = {
    "written_blocks": "blocks written",
    "written_bytes": "bytes of records written: blocks, namespaces, tombstones",
    "write_ns": "nanoseconds that callers waited for batches of writes",
    "read_blocks": "blocks read and verified",
    "read_layer_parts": "parts of one layer read and verified, for attention",
    "read_bytes": "bytes of extents read and verified",
    "read_ns": "nanoseconds that callers waited for batches of reads",
    "failed_writes": "blocks that were not stored: bad source, I/O error, no room",
    "refused_blocks": "blocks that were not tried because the tier is degraded",
    "degradations": "times that the tier became degraded",
    "failed_reads": "reads that the disk refused",
    "gone_reads": "reads of blocks whose segment had just been recycled: misses, and no fault of the disk",
    "corrupt_reads": "reads whose bytes were not what was stored",
    "deleted_blocks": "blocks deleted",
    "recovery_ns": "time that finding out what is stored took",
    "dropped_records": "torn or damaged records and segments found at start",
    "stored_bytes": "of these, blocks that the tiers stored, headers included",
    "rewritten_bytes": "of these, hot blocks written again when their segment was recycled",
    "overhead_bytes": "of these, namespaces and tombstones",
    "header_bytes": "bytes of segment headers written",
    "rewritten_blocks": "hot blocks that moved to another segment",
    "journal_bytes": "bytes appended to the journal",
    "checkpoint_bytes": "bytes of checkpoints",
    "checkpoints": "checkpoints made",
    "failed_journals": "appends to the journal that failed",
    "failed_checkpoints": "checkpoints that could not be made",
    "scrubbed_bytes": "bytes read and verified in the background",
    "scrub_passes": "times that the scrub has gone round",
    "scrub_corrupt": "damaged blocks that the scrub found and dropped",
    "scrub_unreadable": "blocks that the disk did not give to the scrub",
    "syncs": "rounds of making everything durable",
    "failed_syncs": "segments whose sync failed",
    "lost_in_sync": "blocks forgotten because a sync failed",
}
"""Counters since the store was opened."""

GAUGES = {
    "capacity_bytes": "most that the store takes on disk, everything counted",
    "used_bytes": "what it takes now",
    "live_bytes": "bytes of extents that can be read",
    "live_extents": "blocks that can be read",
    "segments": "segments on disk",
    "segment_bytes": "size of new segments",
    "reclaimed_segments": "segments recycled since the store was opened",
    "owed_tombstones": "kills that wait for a disk that takes them",
    "lifetime_written_bytes": "bytes that the store has written since it was made",
    "written_bytes_a_day": "bytes a day at the rate since the store was opened",
    "rated_endurance_bytes": "nvme.rated_endurance; 0 is not known",
    "projected_life_days": "days until the rated endurance is written at this rate, or unknown",
    "devices": "directories of the tier",
    "failed_devices": "those of them that take no stores now, or could not be opened",
    "mode": "how bytes reach the disk",
    "state": "ok, or why stores are not taken: the disk is full, fails, is read-only or gone",
}
"""States at the time of asking."""

TEXTS = frozenset({"mode", "state"})
"""Those of them that are texts."""


WRITTEN = ("written_bytes", "header_bytes", "journal_bytes", "checkpoint_bytes")
"""Counters that make up everything written to the device."""


def written_bytes(counters: Counter[str]) -> int:
    """All bytes that this opening has written."""
    return sum(counters[name] for name in WRITTEN)


def collect(
    counters: Counter[str], ring: Ring, owed: int, mode: IoMode, cause: str, wear: dict[str, int | str]
) -> dict[str, int | str]:
    """All statistics by name."""
    return {
        **wear,
        **{name: counters[name] for name in COUNTERS},
        "capacity_bytes": ring.plan.capacity_bytes,
        "used_bytes": ring.used_bytes(),
        "live_bytes": sum(segment.live_bytes for segment in ring),
        "live_extents": sum(segment.live_count for segment in ring),
        "segments": len(ring),
        "segment_bytes": ring.plan.segment_bytes,
        "reclaimed_segments": ring.reclaimed_segments,
        "owed_tombstones": owed,
        "devices": 1,
        "failed_devices": int(bool(cause)),
        "mode": str(mode),
        "state": f"degraded: {cause}" if cause else "ok",
    }


def combine(parts: Sequence[dict[str, int | str]], failed: Sequence[str]) -> dict[str, int | str]:
    """Statistics of several devices as one: sums, except where the first of them to reach something counts.

    `failed` says of each device that does not work which it is, and why.
    """
    total: dict[str, int | str] = {}
    for name in (*COUNTERS, *GAUGES):
        values = [part[name] for part in parts]
        numbers = [value for value in values if isinstance(value, int)]
        if name in TEXTS or not numbers:
            total[name] = ", ".join(dict.fromkeys(map(str, values)))
        elif name == "segment_bytes":
            total[name] = max(numbers)
        else:
            total[name] = min(numbers) if name == "projected_life_days" else sum(numbers)
    total["devices"] = len(parts) + len(failed) - sum(bool(part["failed_devices"]) for part in parts)
    total["failed_devices"] = len(failed)
    total["state"] = f"degraded: {'; '.join(failed)}" if failed else "ok"
    return total
