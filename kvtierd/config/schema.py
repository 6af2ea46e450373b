"""Every setting: name, type, range, default, meaning. Sizes are bytes here; files may say `64MiB`.

Ranges are checked when settings are loaded (kvtierd.config.check), so that all mistakes are reported at once;
constructing `Settings` in code checks nothing.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvtierd.core.units import GIB, KIB, MIB, PAGE_BYTES

_BYTES = {"unit": "bytes"}
_LIVE = Meta(extra={"reload": True})
"""Taken over by a running daemon on SIGHUP; every other setting needs a restart."""

Count = Annotated[int, Meta(ge=1, le=1 << 24)]
Milliseconds = Annotated[int, Meta(ge=1, le=86_400_000)]
Share = Annotated[float, Meta(gt=0, le=1)]
Size = Annotated[int, Meta(ge=0, le=1 << 50, extra=_BYTES)]
POOL_MAX_BYTES = 1 << 42
"""Of a tier in memory: as many slots as its eviction can number."""
Folder = Annotated[str, Meta(extra={"unit": "folder"})]
Folders = Annotated[str, Meta(extra={"unit": "folders"})]
TENANT_NAME = r"[a-z0-9][a-z0-9_-]{0,31}"
TCP_ADDRESS = r"|(\*|\d{1,3}(\.\d{1,3}){3}|\[[0-9a-fA-F:.]+\]):\d{1,5}"
LOOPBACK = r"|(127(\.\d{1,3}){3}|localhost|\[::1\]):\d{1,5}"


ProfileName = Literal["", "ultra-long", "high-concurrency", "bandwidth-limited", "compute-rich"]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings are fixed once loaded; unknown keys are errors."""


class Compression(_Section, frozen=True, kw_only=True):
    """FP8 of cold blocks, in namespaces that allow loss."""

    enabled: bool = True
    """Whether cold blocks are compressed in host, before they move to nvme or at rest, where their namespace allows
    loss. What is compressed already is read either way."""
    method: Literal["fp8"] = "fp8"
    """e4m3 with one scale per layer, K or V, head and block."""
    threshold: Annotated[int, Meta(ge=0, le=1_000_000)] = 10
    """Heat, in uses, below which a block is cold; with 0 none is. A block that was just stored has a heat of 1: from 2
    on new blocks are compressed as soon as they are written to nvme."""


class KvCache(_Section, frozen=True, kw_only=True):
    """`kv_cache_config`: what shapes the cache itself."""

    block_size: Annotated[int, Meta(ge=1, le=65_536)] = 128
    """Tokens a block, for clients that do not choose their own. This version does not tell clients."""
    gpu_watermark: Annotated[Share, _LIVE] = 0.8
    """Share of the gpu tier in use above which blocks move down."""
    prefetch_window: Annotated[int, Meta(ge=0, le=1024), _LIVE] = 3
    """Blocks of a sequence fetched ahead."""
    eviction: Literal["returns", "lru"] = "returns"
    """Which block goes when host or gpu needs room: the one least likely to be asked for again within the space that it
    takes, learned from when blocks have returned (`returns`), or the least recently used one (`lru`)."""
    heat_half_life_s: Annotated[int, Meta(ge=1, le=31_536_000)] = 3600
    """Seconds after which a use of a block counts half: heat is the sum of its uses, each weighed by its age."""
    ttl_s: Annotated[int, Meta(ge=0, le=315_360_000), _LIVE] = 0
    """Seconds after which blocks that were neither stored nor read are forgotten; 0 is never. A client may name a
    shorter time for a namespace. Counted anew when the daemon starts."""
    compression: Compression = Compression()


class Gpu(_Section, frozen=True, kw_only=True):
    """The `gpu` tier."""

    device: Annotated[str, Meta(pattern=r"auto|host|cuda:\d{1,3}", examples=["auto", "host", "cuda:0"])] = "auto"
    """`auto` or `host`: ordinary memory. `cuda:N`: that GPU, and exit code 69 where there is none; it has been tested
    against a stand-in for CUDA only, and not yet on a GPU."""
    capacity: Annotated[int, Meta(ge=0, le=POOL_MAX_BYTES, extra=_BYTES)] = 256 * MIB
    """Bytes of the pool; 0 switches the tier off. On a GPU, attention takes some 70 MiB beside it."""


class Host(_Section, frozen=True, kw_only=True):
    """The `host` tier: the shared arena."""

    capacity: Annotated[int, Meta(ge=MIB, le=POOL_MAX_BYTES, extra=_BYTES)] = GIB
    """Bytes of all chunks."""
    chunk_bytes: Annotated[int, Meta(ge=MIB, le=256 * MIB, extra=_BYTES | {"power_of_two": True})] = 64 * MIB
    """Bytes of one chunk (1 MiB to 256 MiB); a block must fit in it."""
    watermark: Annotated[Share, _LIVE] = 0.95
    """Share in use above which clean blocks are evicted in the background, down to 5 points below."""
    warm_restart: bool = True
    """Leave the arena with the service manager (systemd's file descriptor store) when the daemon ends, and begin with
    it: blocks in host outlive a restart and a crash. A full stop drops them."""


class Nvme(_Section, frozen=True, kw_only=True):
    """The `nvme` tier."""

    directory: Folders = "/var/lib/kvtierd"
    """Where segments lie: a folder, or a list of folders on a device each (also with `:` between); "" switches the
    tier off."""
    capacity: Size = 0
    """Bytes on disk, everything counted, all folders together; 0 takes of each half of what is free, at most 64 GiB."""
    segment_bytes: Annotated[int, Meta(ge=MIB, le=16 * GIB, multiple_of=PAGE_BYTES, extra=_BYTES)] = 256 * MIB
    """Bytes of one segment file; a block must fit in it."""
    io: Literal["auto", "kvikio", "posix"] = "auto"
    """Engine: `auto` takes KvikIO where GPUDirect Storage works, else our own reader and writer (posix)."""
    mode: Literal["auto", "direct", "buffered"] = "auto"
    """`direct` is required: start fails where the file system refuses O_DIRECT. `auto` falls back and says so."""
    require: Literal["", "o_direct", "kvikio", "gds"] = ""
    """What start must find, or fail: O_DIRECT by either engine, KvikIO in any mode, or GPUDirect Storage."""
    io_threads: Annotated[int, Meta(ge=1, le=64)] = 4
    """Threads that read and write segments."""
    kvikio_task_bytes: Annotated[int, Meta(ge=64 * KIB, le=GIB, multiple_of=PAGE_BYTES, extra=_BYTES)] = 4 * MIB
    """KvikIO cuts larger transfers into tasks of this size; it has `io_threads` threads of its own."""
    write_queue_bytes: Annotated[int, Meta(ge=MIB, le=1 << 50, extra=_BYTES)] = 512 * MIB
    """Most bytes waiting for write-behind; beyond it new blocks stay in host only and are counted as dropped."""
    scrub_rate: Size = 8 * MIB
    """Bytes a second of stored blocks that are read and verified in the background, behind every request; 0 is none."""
    rated_endurance: Size = 0
    """Bytes that the device may be written in its life (TBW of its data sheet); 0 is not known. With it the projected
    life is reported."""
    admission: Literal["all", "second-access", "budgeted"] = "all"
    """Which prefixes are written: `all` when they are stored, `second-access` when they are used again, `budgeted` all
    while half of what `daily_write_budget` lets save up is left, and those that are used again otherwise. What is not
    written is in host only: it is lost when it is evicted there, and when the daemon stops."""
    daily_write_budget: Size = 0
    """Most bytes that are written in any 24 hours, whatever `admission` says; a quarter can be saved up. 0 is no limit.
    Prefixes over it stay in host only and are counted."""


class Server(_Section, frozen=True, kw_only=True):
    """Sockets and limits of clients."""

    runtime_dir: Annotated[str, Meta(min_length=1, extra={"unit": "folder"})] = "/run/kvtierd"
    """Folder of the sockets and the lock file."""
    tenant: Annotated[str, Meta(pattern=TENANT_NAME, examples=["default", "team-a"])] = "default"
    """Name of the tenant that is always served, and of its folder below `runtime_dir`; `tenants` names more."""
    tcp: Annotated[str, Meta(pattern=TCP_ADDRESS, examples=["10.0.0.5:5570", "[::]:5570", "*:5570"])] = ""
    """Address and port for clients of other machines; "" is none. They are known by their CURVE keys (`keys` of a
    tenant), everything is encrypted, and blocks travel in frames. Wants `tcp_key`."""
    tcp_key: Folder = ""
    """File with the server's secret key, which nobody else may read; `kvtierctl keygen` makes it. "" takes the
    service's credential `curve` ($CREDENTIALS_DIRECTORY/curve, LoadCredential= of systemd)."""
    max_sessions: Annotated[int, Meta(ge=1, le=65_536)] = 256
    """Clients of a tenant at one time."""
    max_inflight: Annotated[int, Meta(ge=1, le=65_536)] = 64
    """Requests of one client being worked on."""
    max_message_bytes: Annotated[int, Meta(ge=MIB, le=4 * GIB, extra=_BYTES)] = 256 * MIB
    """All frames of one request."""
    session_idle_s: Annotated[int, Meta(ge=1, le=86_400)] = 600
    """A client without the arena that is silent for this long is forgotten."""
    events: bool = True
    """Publish KV events."""


class Leases(_Section, frozen=True, kw_only=True):
    """How long clients may hold memory."""

    ttl_ms: Milliseconds = 10_000
    """Life of a read lease whose client names none."""
    max_ttl_ms: Annotated[Milliseconds, _LIVE] = 600_000
    """Longest life that a client may ask for."""
    max_leases: Count = 65_536
    """Leases and reservations of all clients at one time."""
    reservation_ttl_ms: Annotated[Milliseconds, _LIVE] = 10_000
    """After it an uncommitted reservation is quarantined: counted, and freed only with its owner."""
    tenant_share: Annotated[float, Meta(gt=0, le=1), _LIVE] = 0.5
    """Where there are several tenants, the share of the host tier that leases, reservations and open sequences of one
    of them may hold, over all of its clients; likewise of `max_leases`. Of a request that wants more the leading blocks
    are served; `busy` where there is room for none. A tenant that is alone may hold all of it."""
    max_pinned_share: Annotated[float, Meta(ge=0, le=1), _LIVE] = 0.5
    """Share of the host tier that pins may hold."""


class Attention(_Section, frozen=True, kw_only=True):
    """Attention over stored blocks, for clients that send queries instead of fetching KV."""

    staging_bytes: Annotated[int, Meta(ge=MIB, le=1 << 40, multiple_of=PAGE_BYTES, extra=_BYTES)] = 64 * MIB
    """Memory through which parts of blocks come from nvme, whatever the context; taken at the first use. A layer of one
    block must fit in it."""
    max_sequences: Annotated[int, Meta(ge=1, le=32_768)] = 1024
    """Open sequences of all clients at one time; one client gets a quarter of them."""
    max_requests: Annotated[int, Meta(ge=1, le=4096)] = 64
    """Requests for attention being worked on at one time; one client gets a quarter of them."""
    kept_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Share of the host tier that open sequences may keep between requests; likewise of the gpu tier."""


class Log(_Section, frozen=True, kw_only=True):
    """What the daemon says."""

    level: Annotated[Literal["debug", "info", "warning", "error"], _LIVE] = "info"
    """Least severe lines that are written."""
    format: Annotated[Literal["auto", "journal", "text", "json"], _LIVE] = "auto"
    """`auto` is the journal with its fields under systemd, text on a terminal, and JSON otherwise."""


class Metrics(_Section, frozen=True, kw_only=True):
    """What operators look at."""

    listen: Annotated[str, Meta(pattern=LOOPBACK, examples=["127.0.0.1:9464", "[::1]:9464"])] = "127.0.0.1:9464"
    """Loopback address and port of /metrics, /healthz and /readyz; "" switches them off. Nobody is asked who he is
    there, hence no other address: put a proxy before it."""
    requests: bool = True
    """Time every request, and count the tokens found: without it there are no request metrics, slow log or watch."""
    slow_ms: Annotated[int, Meta(ge=0, le=3_600_000), _LIVE] = 100
    """Requests that take longer go to the slow log (`kvtierctl slowlog`); 0 keeps all of them."""
    tenants: Annotated[bool, _LIVE] = True
    """Say on `listen` what each tenant has and does, under its name. Every user of this machine can read it: where
    tenants must not see each other's load, switch it off. The operators' socket always has it."""


class Testing(_Section, frozen=True, kw_only=True):
    """For tests of the daemon alone; leave it empty."""

    disk_faults: Annotated[str, Meta(extra={"unit": "file"})] = ""
    """File of faults that the disk of the nvme tier is to have (kvtierd.testing.disk_faults), read again when it
    changes; "" is an ordinary disk. Never set it where blocks matter."""


class Tenant(_Section, frozen=True, kw_only=True):
    """Tenants by name, each with a folder of its own for its sockets, below `server.runtime_dir`. Another tenant's
    block is a miss in every operation. `server.tenant` is one of them, also where it is not named here; what is written
    here holds for it too. A quota of 0 is none; what a tenant has over a lowered one is taken from it."""

    group: Annotated[str, Meta(pattern=r"|[A-Za-z_][A-Za-z0-9_.-]{0,31}", examples=["team-a"])] = ""
    """Group of the folder and of its sockets; the daemon verifies it, and sets it where it may. "" is any."""
    mode: Literal["0700", "0750", "0755"] = "0750"
    """Mode of the folder: for the daemon's user alone, for the group, or for everybody. The sockets' follows. A folder
    that is open to more is refused."""
    keys: Annotated[str, Meta(extra={"unit": "keys"}), _LIVE] = ""
    """CURVE public keys of clients that may come over `server.tcp` as this tenant: a list, or one text with blanks
    between. A key that is taken away ends the sessions that came with it."""
    max_sessions: Annotated[int, Meta(ge=0, le=65_536)] = 0
    """Clients at one time; 0 takes `server.max_sessions`."""
    gpu_bytes: Annotated[Size, _LIVE] = 0
    """Most of the gpu tier, in whole slabs (of `host.chunk_bytes`, or the tier where that is smaller)."""
    host_bytes: Annotated[Size, _LIVE] = 0
    """Most of the host tier, in whole chunks. At its quota a tenant evicts its own blocks."""
    nvme_bytes: Annotated[Size, _LIVE] = 0
    """Most of the nvme tier, counted at the size that blocks have in memory. At its quota those that are in no
    other tier and that it has not used for longest make room."""
    gpu_inflight: Annotated[int, Meta(ge=0, le=65_536), _LIVE] = 0
    """Blocks being read from gpu at one time. Of a request that wants more the leading ones are read; `busy` where
    there is room for none."""
    host_inflight: Annotated[int, Meta(ge=0, le=65_536), _LIVE] = 0
    """Requests of all its clients being worked on at one time; beyond it they are answered `busy`."""
    nvme_inflight: Annotated[int, Meta(ge=0, le=65_536), _LIVE] = 0
    """Blocks being read from nvme at one time, likewise. Attention over stored blocks waits in line for them, with
    three in four of these places."""


class Settings(_Section, frozen=True, kw_only=True):
    """The whole configuration."""

    profile: ProfileName = ""
    """A base of values for a kind of load, under whatever is written explicitly (kvtierd.config.profiles)."""
    kv_cache_config: KvCache = KvCache()
    gpu: Gpu = Gpu()
    host: Host = Host()
    nvme: Nvme = Nvme()
    server: Server = Server()
    leases: Leases = Leases()
    attention: Attention = Attention()
    log: Log = Log()
    metrics: Metrics = Metrics()
    testing: Testing = Testing()
    tenants: dict[str, Tenant] = {}
    cache_dir: Folder = ""
    """Folder of compiled kernels; "" takes $CACHE_DIRECTORY or the user's cache folder."""
    max_blocks: Annotated[int, Meta(ge=1024, le=1 << 30)] = 8 << 20
    """Most blocks in all tiers; address space is reserved for them, memory is taken as they come."""
    worker_threads: Annotated[int, Meta(ge=0, le=256)] = 0
    """Threads for copies and checksums; 0 takes one per CPU, at most 8."""
