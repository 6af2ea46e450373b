"""What a user may say under "kvtierd" in SGLang's `--hicache-storage-backend-extra-config`; all of it has defaults."""

from __future__ import annotations

import msgspec

from kvtierd.connectors.settings import Milliseconds


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The backend's settings.

    `endpoint`: the daemon's socket; by default $KVTIERD_ENDPOINT, else the service's. `lookup_timeout_ms`: a lookup
    that takes longer finds nothing. `load_timeout_ms`, `store_timeout_ms`: how long the daemon may take over one batch
    of pages (32 MiB). `revision`: which weights these are, since SGLang tells the model's name alone. `tenant_salt`
    keeps users of one model apart.
    """

    endpoint: str = ""
    lookup_timeout_ms: Milliseconds = 200.0
    load_timeout_ms: Milliseconds = 2000.0
    store_timeout_ms: Milliseconds = 2000.0
    revision: str = ""
    tenant_salt: str = ""
