"""Kernel offload on the wire (SPEC.md §4): sequences, what is asked of them, and the answers."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvtierd.protocol.replies import Reply
from kvtierd.protocol.requests import Request

QueryDtype = Literal["fp32", "fp16", "bf16"]
QUERY_BYTES: dict[QueryDtype, int] = {"fp32": 4, "fp16": 2, "bf16": 2}

Loss = Literal["any", "pressure", "none"]
"""When a copy that has been through FP8 may stand in for an exact one; see `Attend`."""

MAX_ATTEND_LAYERS = 1024
"""Most layers in one request: as many as a block can have."""


class OpenSequence(Request, kw_only=True, omit_defaults=True, tag="open_sequence"):
    """Resolve the keys of a sequence once, and keep its blocks where they are while it is in use. frames: keys.

    Every block must be present. The sequence ends by CloseSequence, with the session, or by itself when nothing was
    asked of it for `ttl_ms` (0: the daemon's default for leases).
    """

    namespace: int
    ttl_ms: int = 0


class Extend(Request, kw_only=True, omit_defaults=True, tag="extend"):
    """Add blocks behind those of a sequence; answered by how many it has then. frames: keys."""

    sequence: int


class Attend(Request, kw_only=True, omit_defaults=True, tag="attend"):
    """Exact attention of queries over the first `lengths` tokens of a sequence, for each of `layers`.

    frames: q of each layer, [queries, heads, k_dim] of `dtype`; with `sinks` also those of each layer, fp32 [heads].
    `lengths` has one length for all layers or one for each; [] is all tokens of the blocks. Query i stands at
    `position` + i (-1: so that the last one is the last token) and, where `causal`, sees the keys up to its own
    position, `window` of them where that is not 0. `scale` multiplies scores (nil: 1 / sqrt(k_dim)); `soft_cap` c,
    where not 0, makes them c * tanh(score / c). `v_dim` is that of a latent form, 0 elsewhere. `output` is the dtype
    of the output, "" that of q.

    `loss` says when a copy that has been through FP8 may be used though there is an exact one: wherever it is nearer
    (`any`), only while the host tier thrashes (`pressure`), or never (`none`). Where there is no exact copy it is used
    anyway, but with `none`, where that is an error which names the block.
    """

    sequence: int
    layers: list[int]
    queries: int
    heads: int
    dtype: QueryDtype = "bf16"
    lengths: list[int] = msgspec.field(default_factory=list)
    scale: float | None = None
    causal: bool = True
    position: int = -1
    window: int = 0
    soft_cap: float = 0.0
    v_dim: int = 0
    sinks: bool = False
    output: Literal["", "fp32", "fp16", "bf16"] = "fp32"
    loss: Loss = "any"


class CloseSequence(Request, kw_only=True, omit_defaults=True, tag="close_sequence"):
    """End sequences. `quiet` asks for no reply."""

    sequences: list[int]
    quiet: bool = False


class SequenceReply(Reply, kw_only=True, omit_defaults=True, tag="sequence_ok"):
    """The sequence's number, how many blocks it has, and how many of them are kept where they are between requests."""

    sequence: int
    blocks: int
    kept: int = 0
    ttl_ms: int = 0


class AttendReply(Reply, kw_only=True, omit_defaults=True, tag="attend_ok"):
    """frames: of each layer the output, [queries, heads, v_dim], and the log-sum-exp, fp32 [queries, heads]; then the
    numbers of the blocks that were computed from a lossy copy, u32 LE each.

    `gpu_parts`, `host_parts` and `nvme_parts` say where parts of blocks lay, `nvme_bytes` what was read for them.
    """

    gpu_parts: int = 0
    host_parts: int = 0
    nvme_parts: int = 0
    nvme_bytes: int = 0


AttentionRequest = OpenSequence | Extend | Attend | CloseSequence
AttentionReply = SequenceReply | AttendReply
