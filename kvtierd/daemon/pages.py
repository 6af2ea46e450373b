"""What can be asked over HTTP: metrics and health on loopback, and on the operators' socket what only they may see."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, Protocol

import msgspec

from kvtierd.daemon import live
from kvtierd.daemon.census import Census
from kvtierd.daemon.families import ABSENCE_SECONDS, BLOCK_STATES, REQUEST_SECONDS, collect
from kvtierd.daemon.http import Asked, Handler, Page
from kvtierd.daemon.requests import RequestLog
from kvtierd.daemon.selection import chosen, refusals
from kvtierd.daemon.state import in_sections
from kvtierd.daemon.tenant_metrics import TenantNumbers, collect_tenants
from kvtierd.telemetry.fields import plain
from kvtierd.telemetry.prometheus import CONTENT_TYPE, Histogram, Labels, Value, render
from kvtierd.tiers.operator import Operator


class Viewed(Protocol):
    """The daemon as pages see it."""

    requests: RequestLog
    operator: Operator

    def state(self) -> Mapping[str, Any]:
        """Every statistic by name."""
        ...

    def status(self) -> str:
        """One line: what it does."""
        ...

    def stuck(self) -> str:
        """What does not get on; "" while all does."""
        ...

    def unready(self) -> str:
        """Why clients should not come now; "" when they may."""
        ...

    def absences(self) -> Histogram:
        """How long blocks stayed away from host."""
        ...

    def census(self) -> Census:
        """Blocks by state and namespace; called in a thread."""
        ...

    def namespaces(self, census: Census) -> list[dict[str, Any]]:
        """Every namespace with its blocks."""
        ...

    def tenants(self) -> list[dict[str, Any]]:
        """Every tenant with what it has and may have."""
        ...

    @property
    def shows_tenants(self) -> bool:
        """Whether anybody may read what each tenant has and does."""
        ...

    def tenant_numbers(self, census: Census) -> list[TenantNumbers]:
        """What each tenant that is served has and does."""
        ...

    def hold_stores(self, *, yes: bool) -> None:
        """Take no more stores, or take them again."""
        ...

    def holds_stores(self) -> tuple[bool, int]:
        """Whether no more stores are taken, and bytes that are not on disk yet."""
        ...


class Pages:
    """Answers about a daemon; before there is one, pages say that it starts."""

    def __init__(self) -> None:
        self.viewed: Viewed | None = None

    def public(self) -> Mapping[tuple[str, str], Handler]:
        """For anybody on this machine: numbers, no name of a model or a client, and of tenants as they are told to."""
        return {
            ("GET", "/metrics"): self.public_metrics,
            ("GET", "/healthz"): self.healthz,
            ("GET", "/readyz"): self.readyz,
            ("GET", "/"): self.live,
            ("GET", "/live.json"): self.live_numbers,
        }

    def operators(self) -> Mapping[tuple[str, str], Handler]:
        """For root and the daemon's own user, whom the kernel lets through to the socket."""
        return {
            **self.public(),
            ("GET", "/metrics"): self.metrics,
            ("GET", "/info"): self.info,
            ("GET", "/slowlog"): self.slowlog,
            ("GET", "/watch"): self.watch,
            ("GET", "/namespaces"): self.namespaces,
            ("GET", "/tenants"): self.tenants,
            ("GET", "/drain"): self.draining,
            ("POST", "/drain"): self.drain,
            ("GET", "/blocks"): self.blocks,
            ("POST", "/pin"): self.pin,
            ("POST", "/evict"): self.evict,
            ("POST", "/purge"): self.purge,
        }

    async def public_metrics(self, _asked: Asked) -> Page:
        """Everything that is counted, by tenant where the operator wants that here."""
        return await self._metrics(tenants=self.viewed is not None and self.viewed.shows_tenants)

    async def metrics(self, _asked: Asked) -> Page:
        """Everything that is counted."""
        return await self._metrics(tenants=True)

    async def _metrics(self, *, tenants: bool) -> Page:
        if self.viewed is None:
            return _starting()
        viewed = self.viewed
        census = await asyncio.to_thread(viewed.census)
        states = [({"tier": tier, "state": state}, count) for (tier, state), count in census.states().items()]
        seconds = [({"operation": name}, histogram) for name, histogram in viewed.requests.seconds.items()]
        absences: list[tuple[Labels, Value]] = [({}, viewed.absences())]
        of_tenants = collect_tenants(viewed.tenant_numbers(census)) if tenants else ()
        text = render(
            [
                *collect(viewed.state()),
                (BLOCK_STATES, states),
                (REQUEST_SECONDS, seconds),
                (ABSENCE_SECONDS, absences),
                *of_tenants,
            ]
        )
        return Page(text.encode(), CONTENT_TYPE)

    async def healthz(self, _asked: Asked) -> Page:
        """200 while it gets on, while starting too."""
        stuck = self.viewed.stuck() if self.viewed is not None else ""
        return _verdict(stuck)

    async def readyz(self, _asked: Asked) -> Page:
        """200 while clients are served."""
        return _starting() if self.viewed is None else _verdict(self.viewed.unready())

    async def live(self, _asked: Asked) -> Page:
        """The live page."""
        return Page(live.page(), "text/html; charset=utf-8")

    async def live_numbers(self, _asked: Asked) -> Page:
        """What it shows."""
        if self.viewed is None:
            return _starting()
        return _json(live.snapshot(self.viewed, await asyncio.to_thread(self.viewed.census)))

    async def info(self, asked: Asked) -> Page:
        """Statistics by section."""
        if self.viewed is None:
            return _starting()
        sections: dict[str, Any] = in_sections(self.viewed.state())
        if wanted := asked.query.get("section"):
            if wanted not in sections:
                raise ValueError(f"there is no section {wanted!r}; there are {', '.join(sections)}")
            sections = {wanted: sections[wanted]}
        return _json({"status": self.viewed.status(), "sections": sections})

    async def slowlog(self, asked: Asked) -> Page:
        """Requests that took long."""
        if self.viewed is None:
            return _starting()
        requests = self.viewed.requests
        return _page_of(requests.slow_since(_number(asked, "after", 0)), slow_ms=requests.slow_ms)

    async def watch(self, asked: Asked) -> Page:
        """What happened since the last question."""
        return _starting() if self.viewed is None else _page_of(self.viewed.requests.watch(_number(asked, "after", -1)))

    async def namespaces(self, _asked: Asked) -> Page:
        """Every namespace with its blocks."""
        if self.viewed is None:
            return _starting()
        census = await asyncio.to_thread(self.viewed.census)
        return _json({"namespaces": self.viewed.namespaces(census)})

    async def tenants(self, _asked: Asked) -> Page:
        """Every tenant with what it has and may have."""
        return _starting() if self.viewed is None else _json({"tenants": self.viewed.tenants()})

    async def drain(self, asked: Asked) -> Page:
        """Take no more stores, or take them again (`?undo=1`)."""
        if self.viewed is None:
            return _starting()
        self.viewed.hold_stores(yes=asked.query.get("undo", "0") != "1")
        return await self.draining(asked)

    async def blocks(self, asked: Asked) -> Page:
        """Blocks that are chosen, and how many there are."""
        if self.viewed is None:
            return _starting()
        shown, total = await self.viewed.operator.blocks(chosen(asked.query), _number(asked, "count", 50))
        return _json({"blocks": shown, "total": total})

    async def pin(self, asked: Asked) -> Page:
        """Pin what is chosen, or take pins back (`?undo=1`)."""
        if self.viewed is None:
            return _starting()
        operator, which = self.viewed.operator, chosen(asked.query)
        work = operator.unpin(which) if asked.query.get("undo") == "1" else operator.pin(which)
        return _json({"blocks": await refusals(work)})

    async def evict(self, asked: Asked) -> Page:
        """Drop copies in one tier of what is chosen."""
        if self.viewed is None:
            return _starting()
        which = chosen(asked.query)
        if which.tier is None:
            raise ValueError("evict wants a tier: gpu or host")
        dropped, kept = await self.viewed.operator.evict(which, which.tier)
        return _json({"blocks": dropped, "kept": kept})

    async def purge(self, asked: Asked) -> Page:
        """Forget what is chosen, durably."""
        if self.viewed is None:
            return _starting()
        which = chosen(asked.query)
        if which.is_everything and asked.query.get("all") != "1":
            raise ValueError("purge of everything wants all=1")
        return _json({"blocks": await refusals(self.viewed.operator.purge(which))})

    async def draining(self, _asked: Asked) -> Page:
        """How far it is with that; changes nothing."""
        if self.viewed is None:
            return _starting()
        held, left = self.viewed.holds_stores()
        return _json({"draining": held, "backlog_bytes": left, "status": self.viewed.status()})


def _page_of(found: tuple[Iterable[Any], int, int], **more: Any) -> Page:
    entries, following, skipped = found
    return _json({"entries": entries, "next": following, "skipped": skipped, **more})


def _json(value: Any) -> Page:
    return Page(msgspec.json.encode(value, enc_hook=plain) + b"\n", "application/json")


def _verdict(problem: str) -> Page:
    status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
    return Page(f"{problem or 'ok'}\n".encode(), status=status)


def _starting() -> Page:
    return Page(b"starting\n", status=HTTPStatus.SERVICE_UNAVAILABLE)


def _number(asked: Asked, name: str, default: int) -> int:
    text = asked.query.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}; a whole number is wanted") from None
