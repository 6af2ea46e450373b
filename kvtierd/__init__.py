"""kvtierd: a daemon that keeps the KV cache of LLM inference engines in three tiers; `from kvtierd import Client`.

Names are resolved when they are first used, so that importing one package of ours does not load the client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtierd.core.errors import ErrorCode, KvtierdError, RequestError
    from kvtierd.core.geometry import Geometry
    from kvtierd.core.keys import block_keys, foreign_key
    from kvtierd.core.namespace import Namespace
    from kvtierd.protocol.aio import AsyncClient, AsyncLease, AsyncReservation
    from kvtierd.protocol.attention import Sequence
    from kvtierd.protocol.attention_aio import AsyncSequence
    from kvtierd.protocol.attention_plans import Attended
    from kvtierd.protocol.client import Client
    from kvtierd.protocol.connection import Unavailable
    from kvtierd.protocol.curve import CurveKeys, KeyPair
    from kvtierd.protocol.holds import Lease, Reservation
    from kvtierd.protocol.results import Fetched, Hit, NamespaceHandle, Stored

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncLease",
    "AsyncReservation",
    "AsyncSequence",
    "Attended",
    "Client",
    "CurveKeys",
    "ErrorCode",
    "Fetched",
    "Geometry",
    "Hit",
    "KeyPair",
    "KvtierdError",
    "Lease",
    "Namespace",
    "NamespaceHandle",
    "RequestError",
    "Reservation",
    "Sequence",
    "Stored",
    "Unavailable",
    "__version__",
    "block_keys",
    "foreign_key",
]

_HOMES = {
    "AsyncClient": "kvtierd.protocol.aio",
    "AsyncLease": "kvtierd.protocol.aio",
    "AsyncReservation": "kvtierd.protocol.aio",
    "AsyncSequence": "kvtierd.protocol.attention_aio",
    "Attended": "kvtierd.protocol.attention_plans",
    "Client": "kvtierd.protocol.client",
    "CurveKeys": "kvtierd.protocol.curve",
    "ErrorCode": "kvtierd.core.errors",
    "Fetched": "kvtierd.protocol.results",
    "Geometry": "kvtierd.core.geometry",
    "Hit": "kvtierd.protocol.results",
    "KeyPair": "kvtierd.protocol.curve",
    "KvtierdError": "kvtierd.core.errors",
    "Lease": "kvtierd.protocol.holds",
    "Namespace": "kvtierd.core.namespace",
    "NamespaceHandle": "kvtierd.protocol.results",
    "RequestError": "kvtierd.core.errors",
    "Reservation": "kvtierd.protocol.holds",
    "Sequence": "kvtierd.protocol.attention",
    "Stored": "kvtierd.protocol.results",
    "Unavailable": "kvtierd.protocol.connection",
    "block_keys": "kvtierd.core.keys",
    "foreign_key": "kvtierd.core.keys",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
