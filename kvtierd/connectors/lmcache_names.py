"""LMCache's object keys as namespaces and block keys.

What separates objects of one chunk (model, salt, object group, size) is a namespace; the rank and the chunk's hash are
the key. The rank stands in the key, since LMCache asks for all ranks of a chunk at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import blake3
import numpy as np

from kvtierd.connectors.opaque import opaque_geometry
from kvtierd.core.keys import KEY_BYTES, Keys
from kvtierd.core.namespace import Namespace
from kvtierd.protocol.results import NamespaceHandle

_LAYOUT = "opaque:lmcache"
Kind = tuple[str, str, int]
"""Model, salt and object group: what an ObjectKey says of a namespace. Its size is told by the object."""


def kind_of(key: Any) -> Kind:
    """The kind of an LMCache ObjectKey."""
    return key.model_name, key.cache_salt, key.object_group_id


class Names:
    """Handles by kind and size, and which sizes were met of each kind. Thread-safe."""

    def __init__(self, tenant_salt: str) -> None:
        self._tenant_salt = tenant_salt
        self._lock = threading.Lock()
        self._handles: dict[tuple[Kind, int], NamespaceHandle] = {}
        self._sizes: dict[tuple[str, int], list[int]] = {}

    def handle(self, kind: Kind, nbytes: int) -> NamespaceHandle:
        """The namespace of objects of this kind and size. Raises ValueError for a size that cannot be stored."""
        with self._lock:
            if (kind, nbytes) not in self._handles:
                self._handles[kind, nbytes] = self._make(kind, nbytes)
            return self._handles[kind, nbytes]

    def met(self, kind: Kind, nbytes: int) -> None:
        """Objects of a model's group have this size: lookups that do not say look there, the latest first."""
        group = (kind[0], kind[2])
        with self._lock:
            sizes = self._sizes.get(group, ())
            if not sizes or sizes[0] != nbytes:
                self._sizes[group] = [nbytes, *(size for size in sizes if size != nbytes)]

    def sizes(self, kind: Kind) -> list[int]:
        """Sizes that objects of this model's group were met in."""
        with self._lock:
            return list(self._sizes.get((kind[0], kind[2]), ()))

    def _make(self, kind: Kind, nbytes: int) -> NamespaceHandle:
        model, salt, group = kind
        # Lengths keep (`a`, `bc`) and (`ab`, `c`) apart.
        salts = f"{len(self._tenant_salt)}:{self._tenant_salt}:{salt}" if salt else self._tenant_salt
        namespace = Namespace(model=model, tenant_salt=salts, group=group, geometry=opaque_geometry(nbytes, _LAYOUT))
        return NamespaceHandle(namespace, allow_loss=False)


def block_keys_of(handle: NamespaceHandle, keys: Sequence[Any]) -> Keys:
    """[n, 32] uint8: an engine's own hash never enters raw."""
    out = np.empty((len(keys), KEY_BYTES), np.uint8)
    for i, key in enumerate(keys):
        data = handle.digest + key.kv_rank.to_bytes(8, "little") + key.chunk_hash
        out[i] = np.frombuffer(blake3.blake3(data).digest(), np.uint8)
    return out


def by_kind(keys: Iterable[Any]) -> dict[Kind, list[int]]:
    """Positions of keys by their kind, in their order."""
    places: dict[Kind, list[int]] = {}
    for i, key in enumerate(keys):
        places.setdefault(kind_of(key), []).append(i)
    return places
