"""Which eviction policy the tiers run, by the settings."""

from __future__ import annotations

from kvtierd.config.schema import Settings
from kvtierd.core.units import PAGE_BYTES
from kvtierd.policy.eviction import EvictionPolicy, LruEviction
from kvtierd.policy.return_eviction import ReturnEviction
from kvtierd.policy.returns import ReturnModel


def model_for(settings: Settings, secret: int) -> ReturnModel | None:
    """What learns when blocks return; None where the setting is LRU."""
    if settings.kv_cache_config.eviction == "lru":
        return None
    return ReturnModel(settings.host.capacity // PAGE_BYTES, secret)


def policy_for(capacity_bytes: int, model: ReturnModel | None) -> EvictionPolicy:
    """Make the policy of a tier."""
    slots = capacity_bytes // PAGE_BYTES
    return LruEviction(slots) if model is None else ReturnEviction(slots, model)
