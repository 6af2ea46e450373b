"""Everything stored is read back: a sample, all of it, and what is in host already again and again."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtierd.core.stored_form import EncodedLayout
from kvtierd.core.units import MIB, PAGE_BYTES
from kvtierd.stress import ceilings
from kvtierd.stress.rig import Rig

SAMPLE_BLOCKS = 256
LOOKUPS_S = 1.0
HOT_ROUNDS = 4


def sample(rig: Rig) -> None:
    """Blocks at random, in random order, while most lie on disk."""
    rng = random.Random(rig.options.seed)
    count = min(SAMPLE_BLOCKS, rig.options.blocks)
    chosen = rng.sample(range(rig.options.blocks), count)
    parts = [chosen[at :: rig.options.clients] for at in range(rig.options.clients)]
    batch = min(8, rig.options.batch)
    verify_blocks(rig, "sample", [{"do": "verify", "blocks": part, "batch": batch} for part in parts if part], count)


def verify(rig: Rig) -> None:
    """Every block, and how fast the disk gave them."""
    figures = rig.found.figures
    merged = all_blocks(rig, "verify")
    figures["verify"] = merged["blocks"] * rig.options.kv.slot_bytes / merged["seconds"]
    if rig.daemon is not None:
        part = _disk_part(rig)
        figures["disk_read_blocks"] = ceilings.read_rate(
            data_folder(rig), part * rig.options.kv.layers, part * rig.options.kv.layers + PAGE_BYTES,
            max(64, 512 * MIB // (part * rig.options.kv.layers)),
        )  # fmt: skip
        figures["nvme_read"] = merged["blocks"] * part * rig.options.kv.layers / merged["seconds"]


def all_blocks(rig: Rig, phase: str) -> Mapping[str, Any]:
    """Compare all blocks of the context, each client its share."""
    commands = [{"do": "verify", "begin": begin, "end": end, "batch": rig.options.batch} for begin, end in rig.shares()]
    return verify_blocks(rig, phase, commands, rig.options.blocks)


def verify_blocks(rig: Rig, phase: str, commands: list[dict[str, Any]], total: int) -> Mapping[str, Any]:
    """Give clients their blocks to compare; what they found is noted under the phase."""
    rig.watch.phase(phase, total)
    begin_s = time.perf_counter()
    done = rig.crew.run(commands, rig.watch.advance)
    seconds = time.perf_counter() - begin_s
    merged: dict[str, Any] = {
        name: sum(each[name] for each in done) for name in ("blocks", "lossy", "missing", "wrong")
    }
    merged["seconds"] = seconds
    merged["sources"] = {
        name: sum(each["sources"].get(name, 0) for each in done)
        for name in {n for each in done for n in each["sources"]}
    }
    rig.found.findings += [f"{phase}: {finding}" for each in done for finding in each["findings"]]
    rig.found.counts[phase] = merged
    return merged


def _disk_part(rig: Rig) -> int:
    """Bytes of a layer of a block as it lies on disk."""
    return EncodedLayout(rig.options.kv).layer_stride if rig.options.fp8 else rig.options.kv.layer_stride


def data_folder(rig: Rig) -> Path:
    """Where the daemon that was started here has its segments."""
    return rig.folder / "data"


def hot(rig: Rig) -> None:
    """Blocks that are in host already, read again and again: what a hit costs; and lookups."""
    rig.watch.phase("hot", 2)
    clients = rig.options.clients
    room = int(rig.watch.ask()["host_capacity_bytes"]) // 2 // rig.options.kv.slot_bytes
    each = max(1, min(room, rig.options.blocks) // clients)
    first = rig.options.blocks - each * clients
    commands = [
        {"do": "hot", "begin": first + n * each, "end": first + (n + 1) * each, "batch": rig.options.batch,
         "rounds": HOT_ROUNDS}
        for n in range(clients)
    ]  # fmt: skip
    done = rig.crew.run(commands)
    rig.found.figures["host_read"] = sum(r["bytes"] for r in done) / max(r["seconds"] for r in done)
    rig.watch.at(1)
    done = rig.crew.run([{"do": "lookups", "seconds": LOOKUPS_S}] * clients)
    rig.found.figures["lookups"] = sum(r["lookups"] / r["seconds"] for r in done)
    if any(r["found"] < r["lookups"] for r in done):
        rig.found.findings.append("hot: lookups of stored blocks found nothing")
