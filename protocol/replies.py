"""What the daemon answers (protocol/SPEC.md §4), and the messages of the arena socket (§8)."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from kvtierd.core.errors import ErrorCode
from kvtierd.protocol.requests import Message

SLOT_DTYPE = np.dtype(
    [
        ("chunk", "<u4"),  # id of the arena chunk, unique within an epoch
        ("status", "u1"),  # SLOT_*
        ("source", "u1"),  # residency mask before the request: where the block was found
        ("reserved", "<u2"),
        ("offset", "<u8"),  # bytes from the start of the chunk
        ("generation", "<u8"),  # of the slot; compare with the chunk's generation table after copying
    ]
)
"""A slot descriptor, 24 bytes: where in the arena a block lies."""
assert SLOT_DTYPE.itemsize == 24

SPAN_DTYPE = np.dtype(
    [
        ("begin", "<u4"),  # first token that is read here, counted from the first key of the request
        ("count", "<u4"),  # tokens that are read here
        ("tokens", "<u4"),  # tokens of the extent: its slot form is that of a block of so many
        ("first", "<u4"),  # where in the extent they begin
    ]
)
"""A span, 16 bytes: which tokens are to be read from an extent, and what the extent measures."""
assert SPAN_DTYPE.itemsize == 16

SLOT_GRANTED, SLOT_EXISTS, SLOT_BUSY = 0, 1, 2
"""Status of a reserved block: yours to write; already stored or being stored by another; no room now."""


class Reply(Message, kw_only=True, omit_defaults=True):
    """What every reply carries: the daemon's epoch."""

    epoch: int = 0


class HelloReply(Reply, kw_only=True, omit_defaults=True, tag="hello_ok"):
    """The session. `token` proves to the arena socket that its peer is this session.

    `arena` is the path of the Unix socket that hands out descriptors ("" where there is none).
    """

    version: int
    server: str
    token: bytes
    arena: str
    max_batch: int
    max_message_bytes: int
    max_inflight: int
    lease_ttl_ms: int


class NamespaceReply(Reply, kw_only=True, omit_defaults=True, tag="register_ok"):
    """The number of the namespace in this session, and what its blocks measure."""

    namespace: int
    digest: bytes
    block_bytes: int
    slot_bytes: int
    layer_stride: int


class LookupReply(Reply, kw_only=True, omit_defaults=True, tag="lookup_ok"):
    """`hit` blocks lead the request's keys; `tiers` has one residency mask a block: the AND of all namespaces.

    `load` is how many of them are worth loading, the rest being faster computed, and `load_ns` what that should take;
    None where the client did not say how fast it computes. `codecs` has one byte a block, a Codec of
    kvtierd.core.stored_form: what it has been through, in any of the namespaces, where a read would take it from; empty
    where all are exact.
    """

    hit: int
    tiers: bytes = b""
    codecs: bytes = b""
    load: int | None = None
    load_ns: int = 0


class ReserveReply(Reply, kw_only=True, omit_defaults=True, tag="reserve_ok"):
    """frames: `n` slot descriptors. `reservation` is 0 when nothing was granted.

    `retry_after_ms` > 0 where a block was refused for want of room.
    """

    reservation: int
    granted: int
    retry_after_ms: int = 0


class CommitReply(Reply, kw_only=True, omit_defaults=True, tag="commit_ok"):
    """`committed` blocks are visible; `existed` were stored by somebody else meanwhile."""

    committed: int
    existed: int = 0


class AcquireReply(Reply, kw_only=True, omit_defaults=True, tag="acquire_ok"):
    """frames: `count` slot descriptors; layer sums, `count x layers` u64 LE. `lease` is 0 when `count` is 0.

    The answer to AcquirePart is about extents in place of blocks, and has their spans as a third frame. `codecs` has
    one byte a block: what its bytes have been through before they were decoded; empty where all are exact.
    """

    lease: int
    count: int
    ttl_ms: int = 0
    codecs: bytes = b""


class PutReply(Reply, kw_only=True, omit_defaults=True, tag="put_ok"):
    """How many were stored, were there already, and had no room."""

    stored: int
    existed: int = 0
    refused: int = 0
    retry_after_ms: int = 0


class GetReply(Reply, kw_only=True, omit_defaults=True, tag="get_ok"):
    """frames: layer sums, `count x layers` u64 LE; then one packed payload per block. `codecs` as in AcquireReply."""

    count: int
    tiers: bytes = b""
    codecs: bytes = b""


class CountReply(Reply, kw_only=True, omit_defaults=True, tag="count_ok"):
    """How many blocks a request concerned."""

    count: int


class OkReply(Reply, kw_only=True, omit_defaults=True, tag="ok"):
    """Done."""


class StatsReply(Reply, kw_only=True, omit_defaults=True, tag="stats_ok"):
    """Counters and gauges by name; units are in the names."""

    stats: dict[str, Any]


class ErrorReply(Reply, kw_only=True, omit_defaults=True, tag="error"):
    """Nothing changed. `retry_after_ms` > 0: the same request may succeed after that time."""

    code: ErrorCode
    message: str
    retry_after_ms: int = 0


BlockReply = (
    HelloReply
    | NamespaceReply
    | LookupReply
    | ReserveReply
    | CommitReply
    | AcquireReply
    | PutReply
    | GetReply
    | CountReply
    | OkReply
    | StatsReply
    | ErrorReply
)


class ArenaHello(msgspec.Struct, tag="arena_hello", tag_field="op"):
    """First message on the arena socket: the token of the session that this process speaks for."""

    token: bytes


class ArenaMap(msgspec.Struct, tag="arena_map", tag_field="op"):
    """Ask for a chunk's descriptors."""

    chunk: int


class ArenaReady(msgspec.Struct, tag="arena_ready", tag_field="op"):
    """The session may map chunks."""

    epoch: int


class ArenaChunk(msgspec.Struct, tag="arena_chunk", tag_field="op"):
    """With two descriptors: the chunk's data, then a file of generations (u64 LE per slot, read-only).

    Those of this chunk's slots begin at entry `generations_first` of the file.
    """

    chunk: int
    chunk_bytes: int
    slot_bytes: int
    slots: int
    generations_first: int = 0


class ArenaGone(msgspec.Struct, tag="arena_gone", tag_field="op"):
    """The chunk is no longer part of the arena: unmap it. Sent unasked, or as the answer to a map."""

    chunk: int


class ArenaRefused(msgspec.Struct, tag="arena_refused", tag_field="op"):
    """The arena is not for this peer, and why."""

    message: str


AnyArenaRequest = ArenaHello | ArenaMap
AnyArenaReply = ArenaReady | ArenaChunk | ArenaGone | ArenaRefused
