"""What a user may say in the entry of `secondary_tiers`; everything has a default."""

from __future__ import annotations

import msgspec

from kvtierd.connectors.settings import Milliseconds


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The tier's settings.

    `endpoint`: the daemon's socket; by default $KVTIERD_ENDPOINT, else the service's. `lookup_timeout_ms`: a lookup
    that takes longer is a miss. `load_timeout_ms`, `store_timeout_ms`: how long the daemon may take over one batch of
    chunks (32 MiB). `revision`: what the weights are called, instead of the hub's commit or a fingerprint.
    `tenant_salt` keeps users of one model apart. `enable_kv_events` reports chunks that were stored, where vLLM's KV
    events are on.
    """

    endpoint: str = ""
    lookup_timeout_ms: Milliseconds = 50.0
    load_timeout_ms: Milliseconds = 1000.0
    store_timeout_ms: Milliseconds = 1000.0
    revision: str = ""
    tenant_salt: str = ""
    enable_kv_events: bool = False
