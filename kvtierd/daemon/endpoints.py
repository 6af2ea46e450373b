"""All endpoints of a daemon: one for each tenant on this machine, and one for the clients of others."""

from __future__ import annotations

import asyncio
import collections
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from kvtierd import __version__
from kvtierd.config.schema import Settings
from kvtierd.core.clock import Clock
from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.daemon.tenants import TenantFolder, sessions_max, tenants_of_keys
from kvtierd.protocol.curve import KeyPair
from kvtierd.protocol.remote import RemoteServer
from kvtierd.protocol.server import Server
from kvtierd.protocol.service import Observer
from kvtierd.protocol.sessions import Life, Limits
from kvtierd.tiers.manager import TierManager

log = logging.getLogger(__name__)

CREDENTIAL = "curve"
"""Name of systemd's credential with the server's secret key."""


class Endpoints:
    """Answers clients for a manager. All methods run on the loop."""

    def __init__(
        self,
        manager: TierManager,
        settings: Settings,
        folders: tuple[TenantFolder, ...],
        clock: Clock,
        observer: Observer | None,
    ) -> None:
        self._folders = folders
        life = Life(endpoints=len(folders) + bool(settings.server.tcp))
        name = f"kvtierd {__version__}"
        self._local = [
            Server(
                manager,
                folder.path,
                tenant=folder.name,
                limits=_limits(settings, sessions_max(settings, folder.name)),
                chunks=manager,
                clock=clock,
                name=name,
                observer=observer,
                life=life,
            )
            for folder in folders
        ]
        self._remote: RemoteServer | None = None
        if settings.server.tcp:
            self._remote = RemoteServer(
                manager,
                settings.server.tcp,
                _server_keys(settings.server.tcp_key),
                tenants_of_keys(settings),
                limits=_limits(settings, settings.server.max_sessions),
                sessions_max={tenant: sessions_max(settings, tenant) for tenant in settings.tenants},
                clock=clock,
                name=name,
                observer=observer,
                life=life,
            )

    @property
    def endpoint(self) -> str:
        """Address of the first tenant."""
        return self._local[0].endpoint

    @property
    def sessions(self) -> int:
        """Clients that are connected."""
        return sum(len(server.sessions) for server in self._all())

    def sessions_of(self, tenant: str) -> int:
        """Clients of one tenant that are connected."""
        return sum(peer.session.tenant == tenant for server in self._all() for peer in server.sessions)

    @property
    def sessions_opened_total(self) -> int:
        """Clients that ever were."""
        return sum(server.sessions.opened_total for server in self._all())

    @property
    def counters(self) -> collections.Counter[str]:
        """What all endpoints count, together."""
        total: collections.Counter[str] = collections.Counter()
        for server in self._all():
            total.update(server.counters)
        return total

    async def start(self) -> None:
        """Bind all; the caller holds the runtime folder's lock. Raises StartupError."""
        for server, folder in zip(self._local, self._folders, strict=True):
            await server.start(replace_stale=True)
            folder.settle(server.path)
            if server.arena is not None:
                folder.settle(server.arena.path)
        if self._remote is not None:
            await self._remote.start()
            log.info("serving other machines on %s", self._remote.endpoint)

    def apply(self, settings: Settings) -> None:
        """Take over those settings that may change now."""
        if self._remote is not None:
            self._remote.allow(tenants_of_keys(settings))

    def chunk_gone(self, chunk: int) -> None:
        """Have clients unmap a chunk that left the arena."""
        for server in self._local:
            if server.arena is not None:
                server.arena.chunk_gone(chunk)

    def stop_taking(self) -> None:
        """From now on every new request is answered `shutting_down`."""
        for server in self._all():
            server.stop_taking()

    async def drain(self, timeout_s: float) -> bool:
        """Wait for the requests in flight; False when some were still there after `timeout_s`."""
        return all(await asyncio.gather(*(server.drain(timeout_s) for server in self._all())))

    async def close(self) -> None:
        """Close every endpoint."""
        await asyncio.gather(*(server.close() for server in self._all()))

    def _all(self) -> Iterator[Server]:
        yield from self._local
        if self._remote is not None:
            yield self._remote


def _limits(settings: Settings, most_sessions: int) -> Limits:
    server = settings.server
    return Limits(
        max_sessions=most_sessions,
        max_inflight=server.max_inflight,
        max_message_bytes=server.max_message_bytes,
        session_idle_s=server.session_idle_s,
        lease_ttl_ms=settings.leases.ttl_ms,
    )


def _server_keys(file: str) -> KeyPair:
    """The server's pair. Raises StartupError (78) where the file is missing, none, or open to others."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
    path = Path(file) if file else Path(folder) / CREDENTIAL
    if not file and not folder:
        message = (
            "server.tcp wants the server's secret key: make one with `kvtierctl keygen` and name it in server.tcp_key"
        )
        raise StartupError(ExitCode.CONFIG, message)
    try:
        return KeyPair.load(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StartupError(ExitCode.CONFIG, f"server.tcp_key: {path}: {reason}") from error
