"""Ingest, with what bounds it measured before."""

from __future__ import annotations

import time

import numpy as np

from kvtierd.core.units import MIB
from kvtierd.protocol.messages import TIER_NVME
from kvtierd.stress import ceilings
from kvtierd.stress.rig import Rig

UNSEEN = 4
"""Batches that a client stores between two looks at the queue, where the queue is so long."""


def measure_ceilings(rig: Rig) -> None:
    """Before anything is stored: copies, plain writes, and the generator in all clients at once."""
    rig.watch.phase("ceilings", 3)
    figures = rig.found.figures
    figures["copy"] = ceilings.copy_rate(rig.threads)
    rig.watch.at(1)
    probe = min(rig.options.context_bytes // 4, 1024 * MIB)
    figures["disk_write"] = ceilings.write_rate(rig.folder, probe)
    rig.watch.at(2)
    blocks = max(8, min(rig.options.blocks, 512 * MIB // rig.options.kv.slot_bytes) // rig.options.clients)
    done = rig.crew.run([{"do": "generate", "blocks": blocks}] * rig.options.clients)
    figures["generator"] = sum(each["bytes"] for each in done) / max(each["seconds"] for each in done)


def ingest(rig: Rig) -> None:
    """Store the context through all clients, and wait until all of it is durable."""
    options, blocks = rig.options, rig.options.blocks
    rig.watch.phase("ingest", blocks)
    stats = rig.watch.ask()
    limit = min(512 * MIB, int(stats["host_capacity_bytes"]) // 2)
    batches = options.clients * options.batch * options.kv.slot_bytes
    unseen = max(1, min(UNSEEN, limit // (4 * batches)))
    # What each client may still put into the queue when it has looked: what it does not look for, and the batch that
    # it has by then.
    room = max(options.kv.slot_bytes, limit - (unseen + 1) * batches)
    commands = [
        {"do": "ingest", "begin": begin, "end": end, "batch": options.batch, "queue_bytes": room,
         "unseen": unseen, "plants": options.plants}
        for begin, end in rig.shares()
    ]  # fmt: skip
    begin_s = time.perf_counter()
    done = rig.crew.run(commands, rig.watch.advance)
    committed_s = time.perf_counter() - begin_s
    rig.client.flush()
    figures, total = rig.found.figures, options.context_bytes
    figures["ingest_seconds"] = time.perf_counter() - begin_s
    figures["ingest"] = total / committed_s
    figures["ingest_durable"] = total / figures["ingest_seconds"]
    figures["ingest_waited"] = sum(each["waited_s"] for each in done) / len(done)
    _check_all_on_disk(rig)
    _count_writes(rig)


def _check_all_on_disk(rig: Rig) -> None:
    hit = rig.client.lookup(rig.handle, rig.keys)
    missing, unwritten = rig.options.blocks - hit.count, int(np.count_nonzero(hit.tiers & TIER_NVME == 0))
    if missing or unwritten:
        stats = rig.watch.ask()
        causes = {name: value for name, value in stats.items() if value and name.startswith(("offload_", "host_lost"))}
        rig.found.findings.append(
            f"after ingest and flush {missing} blocks are missing (behind block {hit.count}) and {unwritten} are "
            f"not on disk: {causes}"
        )


def _count_writes(rig: Rig) -> None:
    """Everything written to the device since the daemon began, over the payload stored."""
    stats = rig.watch.ask()
    names = ("written_bytes", "header_bytes", "journal_bytes", "checkpoint_bytes")
    written = sum(int(stats[f"nvme_{name}"]) for name in names)
    rig.found.figures["written_bytes"] = written
    rig.found.figures["nvme_write"] = written / rig.found.figures["ingest_seconds"]
    rig.found.figures["write_amplification"] = written / rig.options.context_bytes
    if rig.options.fp8 and stats["compressed_out_bytes"]:
        rig.found.figures["fp8_ratio"] = stats["compressed_in_bytes"] / stats["compressed_out_bytes"]
        rig.found.figures["fp8_error_mean"] = float(stats["compress_relative_l2_mean"])
        rig.found.figures["fp8_error_max"] = float(stats["compress_error_max"])
        rig.found.counts["fp8_blocks"] = int(stats["compressed_blocks"])
