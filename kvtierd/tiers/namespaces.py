"""Namespaces known to the daemon: digest to number, geometry and slot size."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace
from kvtierd.tiers.disk_names import stored_as

MAX_NAMESPACES = 65_000
"""Numbers are u16 in the block table; the rest is kept for marks of our own."""
TTL_MAX_S = 315_360_000
"""Ten years."""


@dataclasses.dataclass(slots=True, eq=False)
class NamespaceEntry:
    """One namespace; `number` is daemon-wide and never reused within an epoch."""

    number: int
    digest: bytes
    namespace: Namespace
    tenant: str
    allow_loss: bool
    """Whether every client that registered it allowed loss; not while none has, after a restart."""
    decided: bool = True
    """Whether a client has registered it in this life of the daemon."""
    ttl_s: int = 0
    """Shortest time to live that a client named, in seconds; 0 where none did."""
    stored: Namespace = dataclasses.field(init=False)
    """As the store knows it."""
    stored_digest: bytes = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.stored = stored_as(self.tenant, self.namespace)
        self.stored_digest = self.digest if self.stored is self.namespace else self.stored.digest()

    @property
    def geometry(self) -> Geometry:
        """Shape of its blocks."""
        return self.namespace.geometry


class NamespaceTable:
    """Namespaces by (tenant, digest). Another tenant's equal namespace is another entry: nothing is shared."""

    def __init__(self) -> None:
        self.entries: list[NamespaceEntry] = []
        self._by_digest: dict[tuple[str, bytes], NamespaceEntry] = {}
        self.tenant_max = MAX_NAMESPACES
        """Most of one tenant, so that it leaves numbers to the others."""
        self._counts: collections.Counter[str] = collections.Counter()
        self.on_change: list[Callable[[NamespaceEntry], None]] = []
        """Told of an entry that is new, or has changed."""

    def register(self, tenant: str, namespace: Namespace, *, allow_loss: bool | None, ttl_s: int = 0) -> NamespaceEntry:
        """Find or make the entry; RequestError `busy` when full, `bad_argument` for a salt that cannot be.

        Loss stays forbidden once one client forbade it, and the shortest time to live holds. `allow_loss` is None where
        no client speaks: blocks of it were found on disk.
        """
        digest = namespace.digest()
        known = self._by_digest.get((tenant, digest))
        if known is not None:
            before = (known.allow_loss, known.ttl_s)
            if allow_loss is not None:
                known.allow_loss = allow_loss and (known.allow_loss or not known.decided)
                known.decided = True
            known.ttl_s = min(known.ttl_s or ttl_s, ttl_s or known.ttl_s)
            if before != (known.allow_loss, known.ttl_s):
                self._tell(known)
            return known
        if len(self.entries) >= MAX_NAMESPACES or self._counts[tenant] >= self.tenant_max:
            raise RequestError(
                ErrorCode.BUSY, f"{self.tenant_max} namespaces are in use; restart the daemon to forget old ones"
            )
        decided = allow_loss is not None
        entry = NamespaceEntry(len(self.entries), digest, namespace, tenant, bool(allow_loss), decided, ttl_s)
        self.entries.append(entry)
        self._counts[tenant] += 1
        self._by_digest[tenant, digest] = entry
        self._tell(entry)
        return entry

    def count_of(self, tenant: str) -> int:
        """How many a tenant has."""
        return self._counts[tenant]

    def _tell(self, entry: NamespaceEntry) -> None:
        for told in self.on_change:
            told(entry)

    def __getitem__(self, number: int) -> NamespaceEntry:
        return self.entries[number]

    def __len__(self) -> int:
        return len(self.entries)
