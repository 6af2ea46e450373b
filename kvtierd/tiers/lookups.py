"""Lookup: which leading run of a prefix is there, where it is, and how much of it is worth loading."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.policy.advice import advise
from kvtierd.protocol.messages import Lookup, LookupReply
from kvtierd.protocol.service import Answer, Session
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.quick import Quick
from kvtierd.tiers.sessions import keys_of, namespace_of, need_frames
from kvtierd.tiers.speeds import Speeds

SLOWEST_TOKENS_PER_S = 1e-6
"""Slower than any engine: keeps times finite."""

Frames = Sequence[memoryview]
Masks = npt.NDArray[np.uint8]


class Lookups:
    """Serves questions, which are no use of a block."""

    def __init__(self, copies: Copies, quick: Quick, speeds: Speeds) -> None:
        self._copies = copies
        self._quick = quick
        self._speeds = speeds

    def lookup(self, session: Session, request: Lookup, frames: Frames) -> Answer:
        """Answer the common prefix of one or several namespaces."""
        need_frames(frames, len(request.namespaces))
        if not frames:
            raise RequestError(ErrorCode.BAD_ARGUMENT, "a lookup names no namespace")
        blocks, counters = self._copies.blocks, self._copies.counters
        masks, asked, codecs = None, frames[0].nbytes, b""
        advised = request.prefill_tokens_per_s != 0
        parts: list[tuple[NamespaceEntry, Masks]] = []
        for number, frame in zip(request.namespaces, frames, strict=True):
            if frame.nbytes != asked:
                raise RequestError(
                    ErrorCode.BAD_ARGUMENT, f"keys frames of {asked} and {frame.nbytes} bytes in a lookup"
                )
            entry = namespace_of(session, number)
            keys = keys_of(frame)
            if masks is not None:
                keys = keys[: masks.size]
            found = self._quick.lookup(entry, keys)
            if found is None:
                rows = blocks.find_prefix(keys, entry.number)
                found, codecs = blocks.residency(rows), self._copies.shapes.forms.codecs_of(rows, codecs)
            elif codecs:
                codecs = self._copies.shapes.forms.shared(codecs, found.size)
            masks = found if masks is None else masks[: found.size] & found
            if advised:
                parts.append((entry, found))
        assert masks is not None
        counters["lookups"] += 1
        counters["lookup_blocks"] += asked // 32
        counters["lookup_hit_blocks"] += masks.size
        reply = LookupReply(id=0, hit=masks.size, tiers=masks.tobytes(), codecs=codecs)
        if advised:
            self._advise(reply, parts, request.prefill_tokens_per_s)
        return Answer(reply)

    def _advise(self, reply: LookupReply, parts: list[tuple[NamespaceEntry, Masks]], tokens_per_s: float) -> None:
        """Add to a lookup's reply how much of the hit is worth loading: a block of every namespace at each place."""
        if not 0 < tokens_per_s < math.inf:
            message = f"prefill_tokens_per_s is {tokens_per_s}; it must be positive, or 0 for no advice"
            raise RequestError(ErrorCode.BAD_ARGUMENT, message)
        fetch_s = np.zeros(reply.hit)
        for entry, masks in parts:
            fetch_s += self._speeds.fetch_s(masks[: reply.hit], entry.geometry.slot_bytes)
        block_tokens = parts[0][0].geometry.block_size
        advice = advise(fetch_s, block_tokens / max(tokens_per_s, SLOWEST_TOKENS_PER_S))
        reply.load, reply.load_ns = advice.load, round(advice.load_s * 1e9)
        self._copies.counters["advised_lookups"] += 1
        self._copies.counters["advised_against_blocks"] += reply.hit - advice.load
