"""Plans on metadata: registration, lookups, counts, and what the daemon says of itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvtierd.core.keys import KEY_BYTES, Keys
from kvtierd.protocol.asking import Ask, Asking, Plan, as_frame
from kvtierd.protocol.messages import (
    AnyRequest,
    CountReply,
    Flush,
    Hello,
    HelloReply,
    Lookup,
    LookupReply,
    OkReply,
    Purge,
    Stats,
    StatsReply,
    Tier,
)
from kvtierd.protocol.pending import Received
from kvtierd.protocol.results import NO_HIT, NO_MASKS, Hit, NamespaceHandle, join_codecs
from kvtierd.protocol.service import Frame

NOTHING_TO_LOAD = Hit(0, NO_MASKS, load=0)


class Queries:
    """Plans that move no data."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._connection = asking.connection
        self._counters = asking.counters

    def register(self, handle: NamespaceHandle, deadline_ns: int) -> Plan[NamespaceHandle]:
        """Give a namespace its number now if the daemon is there; otherwise with its first use."""
        yield from self._asking.ready([handle], deadline_ns)
        return handle

    def ping(self, deadline_ns: int) -> Plan[None]:
        """One round trip."""
        connection = self._connection
        received = yield from self._asking.request(
            [], lambda _: Hello(id=0, resume=connection.token), (), deadline_ns, insist=True
        )
        self._asking.insist(received, HelloReply)

    def stats(self, deadline_ns: int) -> Plan[dict[str, Any]]:
        """Counters and gauges of the daemon."""
        received = yield from self._asking.request([], lambda _: Stats(id=0), (), deadline_ns, insist=True)
        return self._asking.insist(received, StatsReply).stats

    def flush(self, deadline_ns: int) -> Plan[None]:
        """Everything committed before is durable, or dropped and counted."""
        received = yield from self._asking.request([], lambda _: Flush(id=0), (), deadline_ns, insist=True)
        self._asking.insist(received, OkReply)

    def lookup(
        self,
        handles: Sequence[NamespaceHandle],
        keys: Sequence[Keys],
        deadline_ns: int,
        prefill_tokens_per_s: float = 0.0,
    ) -> Plan[Hit]:
        """The common prefix over all these namespaces; with a speed of prefill also how much of it is worth loading."""
        frames = [as_frame(item) for item in keys]
        if len({frame.nbytes for frame in frames}) != 1 or len(frames) != len(handles):
            raise ValueError("a lookup wants one array of keys for each namespace, all of the same length")
        limit = self._connection.max_batch // len(handles) * KEY_BYTES
        hits: list[Hit] = []
        for begin in range(0, max(1, frames[0].nbytes), limit):
            piece = [frame[begin : begin + limit] for frame in frames]
            hit = yield from self._lookup_piece(handles, piece, deadline_ns, prefill_tokens_per_s)
            hits.append(hit)
            if hit.count * KEY_BYTES < piece[0].nbytes:
                break
        if len(hits) == 1:
            return hits[0]
        return _joined(hits)

    def _lookup_piece(
        self,
        handles: Sequence[NamespaceHandle],
        frames: Sequence[Frame],
        deadline_ns: int,
        prefill_tokens_per_s: float,
    ) -> Plan[Hit]:
        def build(numbers: list[int]) -> AnyRequest:
            return Lookup(id=0, namespaces=numbers, prefill_tokens_per_s=prefill_tokens_per_s)

        return self._as_hit((yield from self._asking.request(handles, build, frames, deadline_ns)))

    def _as_hit(self, received: Received | None) -> Hit:
        reply = self._asking.accept(received, LookupReply)
        if reply is None:
            self._counters["lookups_missed_unavailable"] += 1
            return NO_HIT
        if not reply.hit:
            return NO_HIT if reply.load is None else NOTHING_TO_LOAD
        return Hit(
            reply.hit,
            np.frombuffer(reply.tiers, np.uint8),
            reply.load,
            reply.load_ns,
            np.frombuffer(reply.codecs, np.uint8),
        )

    def lookup_many(self, handle: NamespaceHandle, keys: Sequence[Keys], deadline_ns: int) -> Plan[list[Hit]]:
        """Many lookups in one go, each of at most `max_batch` keys; their requests do not wait for one another."""
        frames = [as_frame(item) for item in keys]
        limit = self._connection.max_batch * KEY_BYTES
        if long := [frame.nbytes for frame in frames if frame.nbytes > limit]:
            raise ValueError(f"a lookup of {long[0] // KEY_BYTES} keys is over the limit of {limit // KEY_BYTES}")
        left = list(range(len(frames)))
        hits = [NO_HIT] * len(frames)
        for _ in range(2):
            ready = yield from self._asking.ready([handle], deadline_ns)
            if ready is None:
                break
            session_no, numbers = ready
            requests = [(Lookup(id=0, namespaces=numbers), (frames[i],)) for i in left]
            received = yield Ask(requests, session_no, deadline_ns)
            again = []
            for i, item in zip(left, received, strict=True):
                if self._asking.undelivered(item, deadline_ns):
                    again.append(i)
                else:
                    hits[i] = self._as_hit(item)
            left = again
            if not left:
                return hits
        self._counters["lookups_missed_unavailable"] += len(left)
        return hits

    def count(
        self, handle: NamespaceHandle, build: Callable[[int], AnyRequest], keys: Keys, deadline_ns: int
    ) -> Plan[int]:
        """Prefetch, pin, unpin, delete: how many blocks it concerned, 0 without a daemon."""
        data = as_frame(keys)
        limit = self._connection.max_batch * KEY_BYTES
        total = 0
        for begin in range(0, max(1, data.nbytes), limit):
            received = yield from self._asking.request(
                [handle], lambda numbers: build(numbers[0]), (data[begin : begin + limit],), deadline_ns
            )
            reply = self._asking.accept(received, CountReply)
            if reply is None:
                self._counters["requests_unavailable"] += 1
                break
            total += reply.count
        return total

    def purge(self, handle: NamespaceHandle | None, tiers: Sequence[Tier], deadline_ns: int) -> Plan[int]:
        """Forget a namespace or everything; raises Unavailable where the daemon did not."""

        def build(numbers: list[int]) -> AnyRequest:
            return Purge(id=0, namespace=numbers[0] if numbers else 0, tiers=list(tiers))

        received = yield from self._asking.request([handle] if handle else [], build, (), deadline_ns, insist=True)
        return self._asking.insist(received, CountReply).count


def _joined(hits: Sequence[Hit]) -> Hit:
    """One hit of those of following pieces. Loading ends in the first piece of which not all is worth it."""
    load, load_ns = 0, 0
    for hit in hits:
        load += hit.load or 0
        load_ns += hit.load_ns
        if hit.load != hit.count:
            break
    advised = hits[0].load is not None
    masks = np.concatenate([hit.tiers for hit in hits])
    codecs = join_codecs([(hit.count, hit.codecs) for hit in hits])
    return Hit(sum(hit.count for hit in hits), masks, load if advised else None, load_ns, codecs)
