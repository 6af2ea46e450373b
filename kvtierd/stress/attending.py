"""Decode steps over the context, their parts and bounds, and the oracle's judgement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvtierd.core.stored_form import EncodedLayout
from kvtierd.core.units import MIB, PAGE_BYTES
from kvtierd.stress import ceilings
from kvtierd.stress.decode import Context, Judged, contexts, judge
from kvtierd.stress.reading import data_folder
from kvtierd.stress.rig import TIMEOUT_S, Rig

GPU_SHARE = 0.75
"""Of the gpu tier that blocks of the context are brought into; its watermark is 0.8."""
GROWTH_STRIDE = 8
"""The shorter contexts that steps are compared with have every eighth block: an eighth of a million is 128k."""


def decode(rig: Rig) -> None:
    """Steps over the whole context and over its eighths, in turns."""
    options, figures = rig.options, rig.found.figures
    steps = 2 if options.quick else 3
    asked = contexts(GROWTH_STRIDE, options.blocks)
    rig.watch.phase("decode", len(asked) * (steps + 1))
    _into_gpu(rig)
    command = {
        "do": "decode",
        "stride": GROWTH_STRIDE,
        "layers": list(range(options.kv.layers)),
        "steps": steps,
        "warmup": 1,
        "timeout_s": TIMEOUT_S,
    }
    (answers,) = rig.crew.run([command], rig.watch.advance)
    of = {context: [a for a in answers if (a["first"], a["stride"]) == (context.first, context.stride)]
          for context in asked}  # fmt: skip
    whole, *shorter = (_seconds(of[context], steps) for context in asked)
    figures["step"] = float(np.median(whole))
    if shorter:
        # Together they are the whole context once more, and a token's time in them is that of an eighth of it.
        eighths = np.sum(shorter, axis=0)
        figures["short_step"] = float(np.median(shorter))
        figures["growth"] = float(np.median(np.asarray(whole) / eighths))
    _parts_of(rig, of[asked[0]], steps)
    _bound(rig, of[asked[0]])
    rig.watch.phase("oracle", 2 * options.blocks if shorter else options.blocks)
    judged_blocks = 0
    for context in asked:
        _judge(rig, of[context], context, judged_blocks)
        judged_blocks += len(context.names(options.blocks))


def _seconds(answers: list[Mapping[str, Any]], steps: int) -> list[float]:
    return [sum(a["seconds"] for a in answers if a["step"] == step) for step in range(steps)]


def _into_gpu(rig: Rig) -> None:
    stats = rig.watch.ask()
    capacity = int(stats.get("gpu_capacity_bytes", 0))
    wanted = min(int(capacity * GPU_SHARE) // rig.options.kv.slot_bytes, rig.options.blocks)
    if not wanted:
        return
    rng = np.random.default_rng(rig.options.seed)
    chosen = np.sort(rng.permutation(rig.options.blocks)[:wanted])
    for at in range(0, wanted, 16):
        part = rig.keys[chosen[at : at + 16]]
        rig.client.prefetch(rig.handle, part, tier="gpu", wait=True)
    after = rig.watch.ask()
    moved = int(after["host_to_gpu_moved_bytes"]) - int(stats["host_to_gpu_moved_bytes"])
    busy_ns = int(after["host_to_gpu_moving_ns"]) - int(stats["host_to_gpu_moving_ns"])
    if moved and busy_ns:
        rig.found.figures["gpu_in"] = moved / busy_ns * 1e9


def _parts_of(rig: Rig, answers: list[Mapping[str, Any]], steps: int) -> None:
    """What the daemon says a step was made of, in seconds; the mean over steps."""
    total: dict[str, float] = {}
    for answer in answers:
        for name, value in answer["parts"].items():
            total[name] = total.get(name, 0) + value / steps
    figures = rig.found.figures
    figures["step_inside"] = total.get("attend_ns", 0) / 1e9
    figures["step_disk"] = total.get("attend_disk_ns", 0) / 1e9
    figures["step_copy"] = total.get("attend_copy_ns", 0) / 1e9
    figures["step_compute"] = total.get("attend_compute_ns", 0) / 1e9
    parts = figures["step_disk"] + figures["step_copy"] + figures["step_compute"]
    mean = sum(answer["seconds"] for answer in answers) / steps
    figures["step_overlap"] = max(0.0, parts - mean)
    figures["step_nvme_bytes"] = total.get("attend_nvme_bytes", 0)
    figures["step_host_bytes"] = total.get("attend_host_bytes", 0)
    figures["step_gpu_bytes"] = total.get("attend_gpu_bytes", 0)


def _bound(rig: Rig, answers: list[Mapping[str, Any]]) -> None:
    """The larger of the disk's time for the same bytes and the kernel's for the same tokens."""
    options, figures = rig.options, rig.found.figures
    lossy = any(answer["lossy"] for answer in answers)
    alone = ceilings.KernelAlone(rig.content, options.query_heads, rig.threads, lossy=lossy)
    figures["compute_alone"] = alone.seconds(options.blocks) * options.kv.layers
    figures["disk_alone"] = 0.0
    if rig.daemon is not None and figures["step_nvme_bytes"]:
        part = EncodedLayout(options.kv).layer_stride if lossy else options.kv.layer_stride
        step = part * options.kv.layers + PAGE_BYTES
        figures["disk_read"] = ceilings.read_rate(data_folder(rig), part, step, max(64, 1024 * MIB // part))
        figures["disk_alone"] = figures["step_nvme_bytes"] / figures["disk_read"]


def _judge(rig: Rig, answers: list[Mapping[str, Any]], context: Context, done: int) -> None:
    """Compare with the oracle, which has been through so many blocks before."""
    options = rig.options

    def tell(blocks: int) -> None:
        rig.watch.at(done + blocks)

    judged: Judged = judge(rig.content, options.query_heads, context, options.blocks, answers, rig.threads, tell)
    which = "" if context.stride == 1 else f"every {context.stride}th block from {context.first} on: "
    rig.found.findings += [f"decode: {which}{finding}" for finding in judged.findings]
    figures, counts = rig.found.figures, rig.found.counts
    figures["attend_error"] = max(figures.get("attend_error", 0.0), judged.error)
    figures["attend_lossy_error"] = max(figures.get("attend_lossy_error", 0.0), judged.lossy_error)
    counts["attends_checked"] = counts.get("attends_checked", 0) + judged.checked
