"""KV events: what becomes of a tenant's blocks is told on its own socket, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

from kvtierd.daemon.requests import RequestLog, WatchedEvents
from kvtierd.daemon.tenants import TenantFolder
from kvtierd.protocol.events import EventPublisher
from kvtierd.tiers.copies import EventSink


class TenantEvents:
    """Publishers by tenant. Of one that is not served, whose blocks lie on disk, nobody hears."""

    def __init__(self, folders: Sequence[TenantFolder]) -> None:
        self._folders = folders
        self._publishers = {folder.name: EventPublisher(folder.path) for folder in folders}
        self._sinks: dict[str, EventSink] = dict(self._publishers)

    @property
    def batches_total(self) -> int:
        """Batches that were sent, by all."""
        return sum(publisher.batches_total for publisher in self._publishers.values())

    def start(self) -> None:
        """Bind all; the caller holds the runtime folder's lock. Raises StartupError."""
        for folder in self._folders:
            publisher = self._publishers[folder.name]
            publisher.start(replace_stale=True)
            folder.settle(publisher.path)

    def watched(self, requests: RequestLog) -> None:
        """Have a watcher see them too."""
        self._sinks = {name: WatchedEvents(publisher, requests) for name, publisher in self._publishers.items()}

    def close(self) -> None:
        """Send what waits and close."""
        for publisher in self._publishers.values():
            publisher.close()

    def of(self, tenant: str) -> EventSink:
        """Who is told of a tenant's blocks."""
        return self._sinks.get(tenant, _NOBODY)


class _Nobody:
    def wanted(self) -> bool:
        """Never."""
        return False

    def stored(self, _keys: Sequence[bytes], _parent: bytes | None, _block_size: int, _medium: str) -> None:
        """Nobody hears."""

    def removed(self, _keys: Sequence[bytes], _medium: str) -> None:
        """Nobody hears."""


_NOBODY = _Nobody()
