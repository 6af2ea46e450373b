"""What a user may say in the plugin's `adapter_params`; everything has a default."""

from __future__ import annotations

import msgspec

from kvtierd.connectors.settings import Milliseconds


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The adapter's parameters.

    `endpoint`: the daemon's socket; by default $KVTIERD_ENDPOINT, else the service's. `lookup_timeout_ms`: a lookup
    that takes longer finds nothing. `load_timeout_ms`, `store_timeout_ms`: how long the daemon may take over one batch
    of objects (32 MiB) before they count as not loaded, or not stored. `tenant_salt` keeps users of one model apart.
    """

    endpoint: str = ""
    lookup_timeout_ms: Milliseconds = 200.0
    load_timeout_ms: Milliseconds = 2000.0
    store_timeout_ms: Milliseconds = 2000.0
    tenant_salt: str = ""
