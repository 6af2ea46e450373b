"""What clients may ask (protocol/SPEC.md §4): one struct per request; `messages` is where others import from.

Bulk data never lies in the header: it follows in raw frames, listed in each docstring as `frames`. Keys are
`n x 32` bytes in one frame.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvtierd.core.namespace import Namespace

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 64 << 10
MAX_BATCH = 8192
"""Most blocks in one request."""

Tier = Literal["gpu", "host", "nvme"]
TIERS: tuple[Tier, ...] = ("gpu", "host", "nvme")

TIER_GPU, TIER_HOST, TIER_NVME = 1, 2, 4
"""Bits of a residency mask: a block can be in several tiers at once."""


class Message(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="op", gc=False):
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
    """Open a session. `versions` is the span the client speaks; the reply names the one in use.

    `resume` is the token of a session of this epoch that goes on behind a new socket; where the daemon no longer
    knows it, a new session is opened, which the new token in the reply tells.
    """

    versions: tuple[int, int] = (PROTOCOL_VERSION, PROTOCOL_VERSION)
    client: str = ""
    resume: bytes = b""


class RegisterNamespace(Request, kw_only=True, omit_defaults=True, tag="register"):
    """Name a namespace once per session; others refer to it by the number in the reply.

    `block_bytes` is what the client believes a block's payload to be: error `geometry_mismatch` when its geometry
    says otherwise (0 asks for no check). `allow_loss` permits FP8 for cold blocks. Blocks that are neither
    stored nor read for `ttl_s` seconds are forgotten (0: as the daemon is set); the shortest that a client names holds.
    """

    namespace: Namespace
    block_bytes: int = 0
    allow_loss: bool = False
    ttl_s: int = 0


class Lookup(Request, kw_only=True, omit_defaults=True, tag="lookup"):
    """How long is the stored prefix? frames: one of keys per namespace, all of the same count.

    Over several namespaces (groups or ranks) the answer is their common prefix. A client that says how fast it
    computes KV, `prefill_tokens_per_s` above 0, is told how much of it is worth loading.
    """

    namespaces: list[int]
    prefill_tokens_per_s: float = 0.0


class Reserve(Request, kw_only=True, omit_defaults=True, tag="reserve"):
    """Ask for host slots to write blocks into. frames: keys. Needs the arena.

    `parent` is the key of the block before the first, where the keys are a later part of a prefix; so it is in every
    request that has it. Without it they count as the beginning of one.
    """

    namespace: int
    parent: bytes = b""


class Commit(Request, kw_only=True, omit_defaults=True, tag="commit"):
    """Make reserved blocks visible. frames: layer sums, `n x layers` u64 LE; block sums, `n` u64 LE.

    `index` lists which blocks of the reservation are whole, by position in its keys; None is all that were granted.
    Blocks of the reservation that are not named stay reserved. `verify` has the daemon hash the bytes before they
    become visible. `quiet` asks for an answer only where it is an error; requests are served in their order, so that
    the answer to a later one tells that there was none.
    """

    reservation: int
    index: list[int] | None = None
    verify: bool = False
    quiet: bool = False


class Abort(Request, kw_only=True, omit_defaults=True, tag="abort"):
    """Give back what is left of a reservation: nothing of it becomes visible.

    With `token` it is one of the session that had this token in an earlier life of the daemon: nobody writes its slots
    any more. That is answered `ok` whether they were still kept out of use or not.
    """

    reservation: int
    token: bytes = b""


class Acquire(Request, kw_only=True, omit_defaults=True, tag="acquire"):
    """Lease the leading run of present blocks in host slots, onboarding what lies elsewhere. frames: keys.

    The lease ends by Release, or by itself after `ttl_ms` (0: the daemon's default). `verify` has the daemon
    check each block before it answers. Needs the arena.
    """

    namespace: int
    ttl_ms: int = 0
    verify: bool = False
    parent: bytes = b""


class AcquirePart(Request, kw_only=True, omit_defaults=True, tag="acquire_part"):
    """Lease the extents that hold tokens `begin` to `end` - 1 of the leading run. frames: keys.

    Tokens are counted from the first of the keys; `end` 0 is the end of the last one. Otherwise as Acquire.
    """

    namespace: int
    begin: int = 0
    end: int = 0
    ttl_ms: int = 0
    parent: bytes = b""


class Release(Request, kw_only=True, omit_defaults=True, tag="release"):
    """End leases. `quiet` asks for no reply."""

    leases: list[int]
    quiet: bool = False


class Put(Request, kw_only=True, omit_defaults=True, tag="put"):
    """Store blocks that travel in frames. frames: keys; block sums, `n` u64 LE; then one payload per block, packed."""

    namespace: int
    parent: bytes = b""


class Get(Request, kw_only=True, omit_defaults=True, tag="get"):
    """Fetch the leading run of present blocks in frames. frames: keys."""

    namespace: int
    parent: bytes = b""


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


class Reshape(Request, kw_only=True, omit_defaults=True, tag="reshape"):
    """Have blocks lie in host in extents of these lengths in tokens, in order. frames: keys of blocks in a row.

    An extent is a part of one block or several whole ones, 64 to 512 tokens in steps of 64. Keys stay as they are.
    """

    namespace: int
    parts: list[int]


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


BlockRequest = (
    Hello
    | RegisterNamespace
    | Lookup
    | Reserve
    | Commit
    | Abort
    | Acquire
    | AcquirePart
    | Release
    | Put
    | Get
    | Prefetch
    | Pin
    | Unpin
    | Delete
    | Reshape
    | Purge
    | Flush
    | Stats
)
