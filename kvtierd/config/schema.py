"""Every setting: name, type, default, meaning. Sizes are bytes here; files may say `64MiB`."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvtierd.core.units import GIB, MIB


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings are fixed once loaded; unknown keys are errors."""


class Compression(_Section, frozen=True, kw_only=True):
    """FP8 of cold blocks, in namespaces that allow loss."""

    enabled: bool = True
    method: Literal["fp8"] = "fp8"
    threshold: int = 10
    """Heat below which a block is compressed."""


class KvCache(_Section, frozen=True, kw_only=True):
    """`kv_cache_config`: what shapes the cache itself."""

    block_size: int = 128
    """Tokens a block; clients that do not choose their own take this."""
    gpu_watermark: float = 0.8
    """Share of the gpu tier in use above which blocks move down."""
    prefetch_window: int = 3
    """Blocks of a sequence fetched ahead."""
    compression: Compression = Compression()


class Gpu(_Section, frozen=True, kw_only=True):
    """The `gpu` tier."""

    device: str = "auto"
    """`auto`, `host` (ordinary memory) or `cuda:N`."""
    capacity: int = 256 * MIB
    """Bytes of the pool; 0 switches the tier off."""


class Host(_Section, frozen=True, kw_only=True):
    """The `host` tier: the shared arena."""

    capacity: int = GIB
    """Bytes of all chunks."""
    chunk_bytes: int = 64 * MIB
    """Bytes of one chunk (1 MiB to 256 MiB); a block must fit in it."""
    watermark: float = 0.95
    """Share in use above which clean blocks are evicted in the background, down to 5 points below."""


class Nvme(_Section, frozen=True, kw_only=True):
    """The `nvme` tier."""

    directory: str = "/var/lib/kvtierd"
    """Where segments lie; "" switches the tier off."""
    capacity: int = 0
    """Bytes on disk, everything counted; 0 takes half of what is free, at most 64 GiB."""
    segment_bytes: int = 256 * MIB
    mode: Literal["auto", "direct", "buffered"] = "auto"
    """`direct` is required: start fails where the file system refuses O_DIRECT. `auto` falls back and says so."""
    io_threads: int = 4
    write_queue_bytes: int = 512 * MIB
    """Most bytes waiting for write-behind; beyond it new blocks stay in host only and are counted as dropped."""


class Server(_Section, frozen=True, kw_only=True):
    """Sockets and limits of clients."""

    runtime_dir: str = "/run/kvtierd"
    """Folder of the sockets and the lock file."""
    tenant: str = "default"
    max_sessions: int = 256
    max_inflight: int = 64
    """Requests of one client being worked on."""
    max_message_bytes: int = 256 * MIB
    """All frames of one request."""
    session_idle_s: int = 600
    """A client without the arena that is silent for this long is forgotten."""
    events: bool = True
    """Publish KV events."""


class Leases(_Section, frozen=True, kw_only=True):
    """How long clients may hold memory."""

    ttl_ms: int = 10_000
    max_ttl_ms: int = 600_000
    max_leases: int = 65_536
    reservation_ttl_ms: int = 10_000
    """After it an uncommitted reservation is quarantined: counted, and freed only with its owner."""
    max_pinned_share: float = 0.5
    """Share of the host tier that pins may hold."""


class Log(_Section, frozen=True, kw_only=True):
    """What the daemon says."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "text", "json"] = "auto"


class Settings(_Section, frozen=True, kw_only=True):
    """The whole configuration."""

    kv_cache_config: KvCache = KvCache()
    gpu: Gpu = Gpu()
    host: Host = Host()
    nvme: Nvme = Nvme()
    server: Server = Server()
    leases: Leases = Leases()
    log: Log = Log()
    cache_dir: str = ""
    """Folder of compiled kernels; "" takes $CACHE_DIRECTORY or the user's cache folder."""
    worker_threads: int = 0
    """Threads for copies and checksums; 0 takes one per CPU, at most 8."""
