"""The composition root: which implementation stands behind which contract, and in what order they start."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from kvtierd import __version__
from kvtierd.config.schema import Settings
from kvtierd.core.clock import Clock, SystemClock
from kvtierd.daemon.directories import Places
from kvtierd.daemon.report import reporter
from kvtierd.gpu import open_device
from kvtierd.protocol.events import EventPublisher
from kvtierd.protocol.server import Server
from kvtierd.protocol.sessions import Limits
from kvtierd.storage import SegmentStore
from kvtierd.tiers.manager import TierManager

log = logging.getLogger(__name__)

DRAIN_REQUESTS_S = 5.0
"""How long requests in flight may go on after a stop was asked for."""


class Daemon:
    """All parts of a serving daemon."""

    def __init__(self, manager: TierManager, server: Server) -> None:
        self.endpoint = server.endpoint
        self._manager = manager
        self._server = server

    async def failed(self) -> BaseException:
        """Return the bug that stopped the tiers' ticker."""
        return await self._manager.failed()

    async def drain(self) -> None:
        """Flush the dirty backlog while lookups go on, then let requests in flight end."""
        await self._manager.drain()
        self._server.stop_taking()
        if not await self._server.drain(DRAIN_REQUESTS_S):
            log.warning("requests in flight were cut off after %.0f s", DRAIN_REQUESTS_S)


@contextlib.asynccontextmanager
async def compose(settings: Settings, places: Places) -> AsyncIterator[Daemon]:
    """Build every part in order; take them apart in reverse. The caller holds the runtime folder's lock."""
    clock = SystemClock()
    async with AsyncExitStack() as parts:
        events = _start_events(parts, places) if settings.server.events else None
        manager = await _start_manager(parts, settings, clock, events)
        server = Server(
            manager,
            places.tenant,
            tenant=settings.server.tenant,
            limits=_limits(settings),
            chunks=manager,
            clock=clock,
            name=f"kvtierd {__version__}",
        )
        manager.reports.append(reporter(server, events))
        parts.push_async_callback(server.close)
        await server.start(replace_stale=True)
        if server.arena is not None:
            manager.on_chunk_gone(server.arena.chunk_gone)
        yield Daemon(manager, server)


def _start_events(parts: AsyncExitStack, places: Places) -> EventPublisher:
    events = EventPublisher(places.tenant)
    parts.callback(events.close)
    events.start(replace_stale=True)
    return events


async def _start_manager(
    parts: AsyncExitStack, settings: Settings, clock: Clock, events: EventPublisher | None
) -> TierManager:
    """The manager owns store and device from the moment it has them, and closes them."""
    store = SegmentStore(settings.nvme, clock=clock) if settings.nvme.directory else None
    device = open_device(settings.gpu) if settings.gpu.capacity else None
    tenant = settings.server.tenant
    manager = TierManager(settings, store=store, device=device, clock=clock, events=events, tenant=tenant)
    parts.push_async_callback(manager.close)
    await manager.start()
    if store is not None:
        log.info("nvme tier in %s, I/O mode %s", settings.nvme.directory, store.mode)
    return manager


def _limits(settings: Settings) -> Limits:
    server = settings.server
    return Limits(
        max_sessions=server.max_sessions,
        max_inflight=server.max_inflight,
        max_message_bytes=server.max_message_bytes,
        session_idle_s=server.session_idle_s,
        lease_ttl_ms=settings.leases.ttl_ms,
    )
