"""Protocol v1 as data: one struct per request and reply, a tagged union each (protocol/SPEC.md §4).

The header frame is MessagePack of one of these structs as a map with the tag in `op`. Unknown fields are ignored,
missing fields take their defaults, and both are how the protocol grows. Bulk data never lies in the header: it
follows in raw frames, listed in each docstring as `frames`. Keys are `n x 32` bytes in one frame.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from kvtierd.core.errors import ErrorCode
from kvtierd.core.namespace import Namespace

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 64 << 10
MAX_BATCH = 8192
"""Most blocks in one request."""

Tier = Literal["gpu", "host", "nvme"]
TIERS: tuple[Tier, ...] = ("gpu", "host", "nvme")

TIER_GPU, TIER_HOST, TIER_NVME = 1, 2, 4
"""Bits of a residency mask: a block can be in several tiers at once."""

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

SLOT_GRANTED, SLOT_EXISTS, SLOT_BUSY = 0, 1, 2
"""Status of a reserved block: yours to write; already stored or being stored by another; no room now."""


class Message(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="op"):
    """What every message carries: `id` pairs a reply with its request."""

    id: int


class Request(Message, kw_only=True, omit_defaults=True):
    """What every request carries.

    `epoch` is the daemon's life as told by Hello (0 only in Hello itself); `deadline_ns` is absolute
    CLOCK_MONOTONIC on ipc, checked when the request is taken up: past it the answer is error `deadline`.
    """

    epoch: int = 0
    deadline_ns: int = 0


class Hello(Request, kw_only=True, omit_defaults=True, tag="hello"):
    """Open a session. `versions` is the span the client speaks; the reply names the one in use."""

    versions: tuple[int, int] = (PROTOCOL_VERSION, PROTOCOL_VERSION)
    client: str = ""


class RegisterNamespace(Request, kw_only=True, omit_defaults=True, tag="register"):
    """Name a namespace once per session; others refer to it by the number in the reply.

    `block_bytes` is what the client believes a block's payload to be: error `geometry_mismatch` when its geometry
    says otherwise (0 asks for no check). `allow_loss` permits FP8 for cold blocks.
    """

    namespace: Namespace
    block_bytes: int = 0
    allow_loss: bool = False


class Lookup(Request, kw_only=True, omit_defaults=True, tag="lookup"):
    """How long is the stored prefix? frames: one of keys per namespace, all of the same count.

    Over several namespaces (groups or ranks) the answer is their common prefix.
    """

    namespaces: list[int]


class Reserve(Request, kw_only=True, omit_defaults=True, tag="reserve"):
    """Ask for host slots to write blocks into. frames: keys. Needs the arena."""

    namespace: int


class Commit(Request, kw_only=True, omit_defaults=True, tag="commit"):
    """Make reserved blocks visible. frames: layer sums, `n x layers` u64 LE; block sums, `n` u64 LE.

    `index` lists which blocks of the reservation are whole, by position in its keys; None is all that were granted.
    Blocks of the reservation that are not named stay reserved. `verify` has the daemon hash the bytes before they
    become visible.
    """

    reservation: int
    index: list[int] | None = None
    verify: bool = False


class Abort(Request, kw_only=True, omit_defaults=True, tag="abort"):
    """Give back what is left of a reservation: nothing of it becomes visible."""

    reservation: int


class Acquire(Request, kw_only=True, omit_defaults=True, tag="acquire"):
    """Lease the leading run of present blocks in host slots, onboarding what lies elsewhere. frames: keys.

    The lease ends by Release, or by itself after `ttl_ms` (0: the daemon's default). `verify` has the daemon
    check each block before it answers. Needs the arena.
    """

    namespace: int
    ttl_ms: int = 0
    verify: bool = False


class Release(Request, kw_only=True, omit_defaults=True, tag="release"):
    """End leases. `quiet` asks for no reply."""

    leases: list[int]
    quiet: bool = False


class Put(Request, kw_only=True, omit_defaults=True, tag="put"):
    """Store blocks that travel in frames. frames: keys; block sums, `n` u64 LE; then one payload per block, packed."""

    namespace: int


class Get(Request, kw_only=True, omit_defaults=True, tag="get"):
    """Fetch the leading run of present blocks in frames. frames: keys."""

    namespace: int


class Prefetch(Request, kw_only=True, omit_defaults=True, tag="prefetch"):
    """Bring the leading run towards a tier in the background; answers at once. frames: keys.

    `wait` answers when the moves are done or the deadline is near.
    """

    namespace: int
    tier: Tier = "host"
    wait: bool = False


class Pin(Request, kw_only=True, omit_defaults=True, tag="pin"):
    """Keep blocks from being evicted from host or dropped, until Unpin or the end of the session. frames: keys."""

    namespace: int


class Unpin(Request, kw_only=True, omit_defaults=True, tag="unpin"):
    """Take back this session's pins; a pin that it does not hold is ignored and not counted. frames: keys."""

    namespace: int


class Delete(Request, kw_only=True, omit_defaults=True, tag="delete"):
    """Forget blocks in every tier; hidden at once, freed when the last lease ends. frames: keys."""

    namespace: int


class Purge(Request, kw_only=True, omit_defaults=True, tag="purge"):
    """Forget a namespace (0: all of the tenant's), or only its copies in `tiers`.

    With `tiers`, a copy is dropped only where another copy remains: nothing is lost.
    """

    namespace: int = 0
    tiers: list[Tier] = []


class Flush(Request, kw_only=True, omit_defaults=True, tag="flush"):
    """Answer when every block committed before it is on stable storage, or was dropped and counted."""


class Stats(Request, kw_only=True, omit_defaults=True, tag="stats"):
    """Counters and gauges of the tenant and of the daemon."""


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
    """`hit` blocks lead the request's keys; `tiers` has one residency mask a block: the AND of all namespaces."""

    hit: int
    tiers: bytes = b""


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
    """frames: `count` slot descriptors; layer sums, `count x layers` u64 LE. `lease` is 0 when `count` is 0."""

    lease: int
    count: int
    ttl_ms: int = 0


class PutReply(Reply, kw_only=True, omit_defaults=True, tag="put_ok"):
    """How many were stored, were there already, and had no room."""

    stored: int
    existed: int = 0
    refused: int = 0
    retry_after_ms: int = 0


class GetReply(Reply, kw_only=True, omit_defaults=True, tag="get_ok"):
    """frames: layer sums, `count x layers` u64 LE; then one packed payload per block."""

    count: int
    tiers: bytes = b""


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


AnyRequest = (
    Hello
    | RegisterNamespace
    | Lookup
    | Reserve
    | Commit
    | Abort
    | Acquire
    | Release
    | Put
    | Get
    | Prefetch
    | Pin
    | Unpin
    | Delete
    | Purge
    | Flush
    | Stats
)
AnyReply = (
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
    """With two descriptors: the chunk's data, then its generation table (u64 LE per slot, read-only)."""

    chunk: int
    chunk_bytes: int
    slot_bytes: int
    slots: int


class ArenaGone(msgspec.Struct, tag="arena_gone", tag_field="op"):
    """The chunk is no longer part of the arena: unmap it. Sent unasked, or as the answer to a map."""

    chunk: int


class ArenaRefused(msgspec.Struct, tag="arena_refused", tag_field="op"):
    """The arena is not for this peer, and why."""

    message: str


AnyArenaRequest = ArenaHello | ArenaMap
AnyArenaReply = ArenaReady | ArenaChunk | ArenaGone | ArenaRefused
