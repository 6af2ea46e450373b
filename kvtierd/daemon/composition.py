"""The composition root: which implementation stands behind which contract, and in what order they start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from kvtierd.config.fields import split_folders
from kvtierd.config.schema import Settings, Tenant
from kvtierd.core.clock import Clock, SystemClock
from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.core.progress import Progress
from kvtierd.core.units import format_bytes
from kvtierd.daemon.census import Census, count
from kvtierd.daemon.directories import Places, prepare_admin
from kvtierd.daemon.endpoints import Endpoints
from kvtierd.daemon.fdstore import NotifyKeeper, passed_files
from kvtierd.daemon.http import HttpServer
from kvtierd.daemon.liveness import DEFAULT_STALL_S, Liveness, Watchdog, long_step
from kvtierd.daemon.pages import Pages
from kvtierd.daemon.report import reporter
from kvtierd.daemon.requests import RequestLog
from kvtierd.daemon.tenant_events import TenantEvents
from kvtierd.daemon.tenant_metrics import TenantNumbers, numbers_of
from kvtierd.gpu import open_device
from kvtierd.protocol.endpoint import SOCKET_NAME
from kvtierd.storage.io_select import SelectedIo
from kvtierd.storage.store import SegmentStore
from kvtierd.storage.striped import StripedStore, make_store
from kvtierd.telemetry.notify import watchdog_period_s
from kvtierd.telemetry.prometheus import Histogram
from kvtierd.tiers.copies import Events
from kvtierd.tiers.manager import TierManager
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.warm_host import Kept

log = logging.getLogger(__name__)

PORT_RETRY_S = 15.0
DRAIN_REQUESTS_S = 5.0
"""How long requests in flight may go on after a stop was asked for."""


class Daemon:
    """All parts of a serving daemon."""

    def __init__(self, manager: TierManager, server: Endpoints, liveness: Liveness, requests: RequestLog) -> None:
        self.endpoint = server.endpoint
        self.requests = requests
        self.operator = manager.operator
        self._held = False
        self._stopping = False
        self._manager = manager
        self._server = server
        self._liveness = liveness
        self.watchdog = Watchdog(liveness, watchdog_period_s(), self.status)
        self._watching = asyncio.create_task(self.watchdog.run(), name="watchdog")

    async def close(self) -> None:
        """Stop watching; the parts are closed by whoever made them."""
        await _end(self._watching)

    async def failed(self) -> BaseException:
        """Return the bug that stopped the tiers' ticker, the write-behind or the watchdog."""
        manager = asyncio.create_task(self._manager.failed(), name="manager-failure")
        try:
            await asyncio.wait({manager, self._watching}, return_when=asyncio.FIRST_COMPLETED)
            return manager.result() if manager.done() else self._watching.exception() or AssertionError("it ended")
        finally:
            manager.cancel()

    def status(self) -> str:
        """One line for `systemctl status`."""
        if self._held or self._stopping:
            return f"draining, {format_bytes(self._manager.backlog_bytes)} to write; reads go on"
        counts = self._manager.copies.tier_counts()  # not all statistics: those take a sample of every block's heat
        tiers = ", ".join(f"{tier} {counts[f'{tier}_blocks']}" for tier in ("gpu", "host", "nvme"))
        return f"serving on {self.endpoint}; {self._server.sessions} clients; blocks: {tiers}"

    def state(self) -> Mapping[str, Any]:
        """Every statistic by name."""
        return self._manager.stats()

    def stuck(self) -> str:
        """What does not get on; "" while all does."""
        return self.watchdog.stuck

    def unready(self) -> str:
        """Why clients should not come now; "" when they may."""
        return self.stuck() or ("draining" if self._held or self._stopping else "")

    def absences(self) -> Histogram:
        """How long blocks stayed away from host."""
        return self._manager.copies.absences.seconds

    def census(self) -> Census:
        """Blocks by state and namespace; a pass over the block table, for a thread."""
        copies = self._manager.copies
        return count(copies.blocks.table, len(copies.namespaces))

    def namespaces(self, census: Census) -> list[dict[str, Any]]:
        """Every namespace with the number of its blocks."""
        counts = census.by_namespace.tolist()
        entries = self._manager.copies.namespaces.entries
        return [_described(entry, blocks) for entry, blocks in zip(entries, counts, strict=False)]

    def tenants(self) -> list[dict[str, Any]]:
        """Every tenant that is served, with what it has and may have."""
        settings = self._manager.settings
        names = dict.fromkeys([settings.server.tenant, *settings.tenants])
        return [
            {
                "tenant": name,
                "sessions": self._server.sessions_of(name),
                **self._manager.quotas.described(name, settings.tenants.get(name, Tenant())),
            }
            for name in names
        ]

    @property
    def shows_tenants(self) -> bool:
        """Whether anybody may read what each tenant has and does."""
        return self._manager.settings.metrics.tenants

    def tenant_numbers(self, census: Census) -> list[TenantNumbers]:
        """What each tenant that is served has and does."""
        settings, quotas = self._manager.settings, self._manager.quotas
        entries: dict[str, list[NamespaceEntry]] = {}
        for entry in self._manager.copies.namespaces.entries[: census.by_namespace.size]:
            entries.setdefault(entry.tenant, []).append(entry)
        return [
            numbers_of(
                name,
                settings.tenants.get(name, Tenant()),
                entries.get(name, []),
                census,
                quotas,
                self._server.sessions_of(name),
                self.requests.tokens_of(name),
            )
            for name in dict.fromkeys([settings.server.tenant, *settings.tenants])
        ]

    def hold_stores(self, *, yes: bool) -> None:
        """An operator's wish: take no more stores, or take them again."""
        if self._held != yes:
            log.info("an operator said: %s", "take no more stores" if yes else "take stores again")
        self._held = yes
        self._manager.take_stores(yes=not (self._held or self._stopping))

    def holds_stores(self) -> tuple[bool, int]:
        """Whether no more stores are taken, and bytes that are not on disk yet."""
        return self._held or self._stopping, self._manager.backlog_bytes

    def apply(self, settings: Settings) -> None:
        """Take over those settings that may change now."""
        self._manager.apply(settings)
        self._server.apply(settings)
        self.requests.slow_ms = settings.metrics.slow_ms

    async def drain(self) -> None:
        """Flush the dirty backlog while lookups go on, then let requests in flight end."""
        self._stopping = True
        log.info("flushing %s", format_bytes(self._manager.backlog_bytes))
        async with long_step(self.status, self._liveness):
            await self._manager.drain()
            self._server.stop_taking()
            if not await self._server.drain(DRAIN_REQUESTS_S):
                log.warning("requests in flight were cut off after %.0f s", DRAIN_REQUESTS_S)


@contextlib.asynccontextmanager
async def compose(settings: Settings, places: Places) -> AsyncIterator[Daemon]:
    """Build every part in order; take them apart in reverse. The caller holds the runtime folder's lock."""
    clock = SystemClock()
    requests, pages = RequestLog(clock, settings.metrics.slow_ms), Pages()
    async with AsyncExitStack() as parts:
        await _start_pages(parts, settings, places, pages)
        events = _start_events(parts, places) if settings.server.events else None
        store = _make_store(settings, clock) if settings.nvme.directory else None
        disk = {"nvme": store.progress} if store is not None else dict[str, Progress]()
        stall_s = watchdog_period_s() or DEFAULT_STALL_S
        async with long_step(lambda: "recovering the nvme tier", Liveness(disk, stall_s, clock)):
            if events is not None and settings.metrics.requests:
                events.watched(requests)
            manager = await _start_manager(parts, settings, clock, events, store)
        server = Endpoints(manager, settings, places.tenants, clock, requests if settings.metrics.requests else None)
        manager.reports.append(requests.statistics)
        manager.reports.append(reporter(server, events))
        parts.push_async_callback(server.close)
        await server.start()
        manager.on_chunk_gone(server.chunk_gone)
        liveness = Liveness({"copies": manager.progress, **disk}, stall_s, clock)
        pages.viewed = daemon = Daemon(manager, server, liveness, requests)
        parts.push_async_callback(daemon.close)
        yield daemon


async def _start_pages(parts: AsyncExitStack, settings: Settings, places: Places, pages: Pages) -> None:
    """Metrics on loopback and the operators' socket: first of all, so that a long recovery can be looked at."""
    folder = prepare_admin(places)
    operators, public = HttpServer(pages.operators()), HttpServer(pages.public())
    for server in (operators, public):
        parts.push_async_callback(server.close)
    await operators.listen_unix(folder / SOCKET_NAME)
    if settings.metrics.listen:
        task = asyncio.create_task(_listen(public, settings.metrics.listen), name="metrics-port")
        parts.push_async_callback(_end, task)


async def _listen(server: HttpServer, address: str) -> None:
    """Take the metrics' port, now or when it is free.

    Any user of the machine can be there first: that must not keep the cache from serving.
    """
    told = False
    while True:
        try:
            await server.listen_tcp(address)
        except StartupError as error:
            if not told:
                log.error("%s; there are no metrics on it until it is free", error)
            told = True
            await asyncio.sleep(PORT_RETRY_S)
        else:
            log.info("metrics on http://%s/metrics", address)
            return


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _start_events(parts: AsyncExitStack, places: Places) -> TenantEvents:
    events = TenantEvents(places.tenants)
    parts.callback(events.close)
    events.start()
    return events


async def _start_manager(
    parts: AsyncExitStack,
    settings: Settings,
    clock: Clock,
    events: Events | None,
    store: SegmentStore | StripedStore | None,
) -> TierManager:
    """The manager owns store and device from the moment it has them, and closes them."""
    device = open_device(settings.gpu) if settings.gpu.capacity else None
    kept = _kept_files(settings)
    manager = TierManager(settings, store=store, device=device, clock=clock, events=events, kept=kept)
    parts.push_async_callback(manager.close)
    await manager.start()
    if store is not None:
        log.info("nvme tier in %s, I/O mode %s", settings.nvme.directory, store.mode)
    return manager


def _make_store(settings: Settings, clock: Clock) -> SegmentStore | StripedStore:
    if not settings.testing.disk_faults:
        return make_store(settings.nvme, clock=clock)
    from kvtierd.testing.disk_faults import DiskFaults  # for tests alone, as the setting says

    if len(split_folders(settings.nvme.directory)) > 1:
        raise StartupError(ExitCode.CONFIG, "testing.disk_faults wants one folder in nvme.directory")
    log.warning("testing.disk_faults is set: the disk misbehaves as %s says", settings.testing.disk_faults)
    io = DiskFaults(SelectedIo(settings.nvme), Path(settings.testing.disk_faults))
    return SegmentStore(settings.nvme, clock=clock, io=io)


def _kept_files(settings: Settings) -> Kept | None:
    """What the life before left with the service manager, where it is to be used and there is one to keep ours."""
    passed = passed_files(os.environ)
    if settings.host.warm_restart and "NOTIFY_SOCKET" in os.environ:
        return Kept(NotifyKeeper(), passed)
    for name, fd in passed:
        NotifyKeeper().forget(name)
        os.close(fd)
    return None


def _described(entry: NamespaceEntry, blocks: int) -> dict[str, Any]:
    space = entry.namespace
    return {
        "digest": entry.digest.hex(),
        "tenant": entry.tenant,
        "model": space.model,
        "revision": space.revision,
        "dtype": entry.geometry.dtype,
        "block_size": entry.geometry.block_size,
        "block_bytes": entry.geometry.block_bytes,
        "loss_allowed": entry.allow_loss,
        "blocks": blocks,
        "bytes": blocks * entry.geometry.slot_bytes,
    }
