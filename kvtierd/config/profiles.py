"""Profiles: a base of values for a kind of load, under whatever is written explicitly."""

from __future__ import annotations

from kvtierd.config.fields import FIELDS
from kvtierd.config.origins import Layer, Written

PROFILES: dict[str, dict[str, str]] = {
    # A long context has few prefixes and many blocks: larger ones mean fewer keys and longer reads.
    "ultra-long": {"kv_cache_config.block_size": "512"},
    # Many short prompts share short prefixes: smaller blocks waste less at the tail.
    "high-concurrency": {"kv_cache_config.block_size": "64"},
    # Where moving bytes is dear, all but the hottest blocks become FP8.
    "bandwidth-limited": {
        "kv_cache_config.compression.enabled": "true",
        "kv_cache_config.compression.threshold": "100",
    },
    # Where compute waits for data, fetch further ahead.
    "compute-rich": {"kv_cache_config.prefetch_window": "5"},
}

assert set(PROFILES) == set(FIELDS["profile"].choices) - {""}
assert all(key in FIELDS for values in PROFILES.values() for key in values)


def profile_layer(name: str, origin: str) -> Layer:
    """The values of a profile; their origin names it and where it was chosen."""
    return {key: Written(text, f"profile {name}, {origin}") for key, text in PROFILES.get(name, {}).items()}
