"""Namespaces known to the daemon: digest to number, geometry and slot size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import Namespace

MAX_NAMESPACES = 65_000
"""Numbers are u16 in the block table; the rest is kept for marks of our own."""


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

    @property
    def geometry(self) -> Geometry:
        """Shape of its blocks."""
        return self.namespace.geometry


class NamespaceTable:
    """Namespaces by (tenant, digest). Another tenant's equal namespace is another entry: nothing is shared."""

    def __init__(self) -> None:
        self.entries: list[NamespaceEntry] = []
        self._by_digest: dict[tuple[str, bytes], NamespaceEntry] = {}
        self.on_change: Callable[[NamespaceEntry], None] = lambda _entry: None
        """Told of an entry that is new, or has changed."""

    def register(self, tenant: str, namespace: Namespace, *, allow_loss: bool | None) -> NamespaceEntry:
        """Find or make the entry. Loss stays forbidden once one client forbade it; RequestError `busy` when full.

        `allow_loss` is None where no client speaks: blocks of it were found on disk.
        """
        digest = namespace.digest()
        known = self._by_digest.get((tenant, digest))
        if known is not None:
            if allow_loss is not None:
                before = known.allow_loss
                known.allow_loss = allow_loss and (known.allow_loss or not known.decided)
                known.decided = True
                if known.allow_loss != before:
                    self.on_change(known)
            return known
        if len(self.entries) >= MAX_NAMESPACES:
            raise RequestError(
                ErrorCode.BUSY, f"{MAX_NAMESPACES} namespaces are in use; restart the daemon to forget old ones"
            )
        entry = NamespaceEntry(
            len(self.entries), digest, namespace, tenant, bool(allow_loss), decided=allow_loss is not None
        )
        self.entries.append(entry)
        self._by_digest[tenant, digest] = entry
        self.on_change(entry)
        return entry

    def __getitem__(self, number: int) -> NamespaceEntry:
        return self.entries[number]

    def __len__(self) -> int:
        return len(self.entries)
