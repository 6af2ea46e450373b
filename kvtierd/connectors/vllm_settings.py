"""What a user may say in `kv_connector_extra_config`; everything has a default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvtierd.connectors import settings
from kvtierd.connectors.settings import Milliseconds


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The connector's settings.

    `endpoint`: the daemon's socket; by default $KVTIERD_ENDPOINT, else the service's. `lookup_timeout_ms`: a lookup
    that takes longer is a miss. `load_timeout_ms`, `save_timeout_ms`: how long the daemon may take over one batch of
    blocks before they are recomputed, or not stored. `model`, `revision`: what the weights are called, instead of
    vLLM's model name and a fingerprint. `tenant_salt` keeps users of one model apart.
    """

    endpoint: str = ""
    lookup_timeout_ms: Milliseconds = 50.0
    load_timeout_ms: Milliseconds = 1000.0
    save_timeout_ms: Milliseconds = 1000.0
    model: str = ""
    revision: str = ""
    tenant_salt: str = ""


def read_settings(extra: Mapping[str, Any]) -> Settings:
    """Check `kv_connector_extra_config`. Raises ValueError naming what is wrong in it, and the nearest key."""
    return settings.read_settings(Settings, extra, "kv_connector_extra_config")
