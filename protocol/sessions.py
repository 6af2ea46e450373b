"""Who is connected: sessions by routing id and by token, with a limit and an idle time (protocol/SPEC.md §5)."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from kvtierd.core.clock import Clock
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.protocol.codec import clip
from kvtierd.protocol.messages import MAX_BATCH, PROTOCOL_VERSION, Hello
from kvtierd.protocol.service import Service, Session

TOKEN_BYTES = 16
MAX_CLIENT_NAME = 200
PROBE_NS = 1_000_000_000
"""A session that was silent for this long may be asked whether it is still there; all of them at most so often."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What one daemon grants; every number is fixed at start (meanings as in the `server` section)."""

    max_sessions: int = 256
    max_inflight: int = 64
    max_message_bytes: int = 256 << 20
    session_idle_s: float = 600.0
    max_batch: int = MAX_BATCH
    lease_ttl_ms: int = 10_000
    default_deadline_s: float = 60.0
    """For a request that names no deadline, and the most that one may name."""


@dataclasses.dataclass(slots=True, eq=False)
class Life:
    """What all `endpoints` of one life of the daemon have in common: its epoch, and the numbers of sessions, by which
    the service tells clients apart."""

    endpoints: int = 1
    epoch: int = dataclasses.field(default_factory=lambda: 1 + secrets.randbelow((1 << 63) - 1))
    session_numbers: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))


@dataclasses.dataclass(slots=True, eq=False)
class Peer:
    """A session as the server keeps it: where its replies go and what it has under way."""

    rid: bytes
    session: Session
    seen_ns: int
    unsent_bytes: int = 0
    tasks: set[asyncio.Task[Any]] = dataclasses.field(default_factory=set)


class SessionTable:
    """All sessions of one tenant's endpoint. `on_end` is told of each that ends, once.

    `is_reachable` says whether a routing id still has a connection: ZeroMQ does not tell us when one ends.
    """

    def __init__(
        self,
        service: Service,
        tenant: str,
        *,
        limits: Limits,
        clock: Clock,
        numbers: Iterator[int],
        on_end: Callable[[Session], None],
        is_reachable: Callable[[bytes], bool],
    ) -> None:
        self._service = service
        self._tenant = tenant
        self._limits = limits
        self._clock = clock
        self._on_end = on_end
        self._is_reachable = is_reachable
        self._probed_ns = 0
        self._by_token: dict[bytes, Peer] = {}
        self._numbers = numbers
        self.by_rid: dict[bytes, Peer] = {}
        self.opened_total = 0

    def __len__(self) -> int:
        return len(self._by_token)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_token.values()))

    def by_token(self, token: bytes) -> Peer | None:
        """The session that a token stands for."""
        return self._by_token.get(token)

    def hello(self, rid: bytes, request: Hello) -> Peer:
        """Open a session, or find the one that this socket or token already has.

        Raises RequestError: `bad_version` when we share no version, `busy` when there are too many sessions.
        """
        low, high = request.versions
        if not low <= PROTOCOL_VERSION <= high:
            message = f"the client speaks versions {low} to {high}; this daemon speaks {PROTOCOL_VERSION}"
            raise RequestError(ErrorCode.BAD_VERSION, message)
        if (peer := self.by_rid.get(rid)) is not None:
            return peer
        if request.resume and (peer := self._by_token.get(request.resume)) is not None:
            self.by_rid.pop(peer.rid, None)
            peer.rid = rid
            peer.seen_ns = self._clock.now_ns()
            self.by_rid[rid] = peer
            return peer
        return self._open(rid, request)

    def _open(self, rid: bytes, request: Hello) -> Peer:
        if self._room() <= 0 and self._clock.now_ns() - self._probed_ns > PROBE_NS:
            self.end_gone()
        if self._room() <= 0:
            message = "as many sessions are open as may be (server.max_sessions, or the tenant's own limit)"
            raise RequestError(ErrorCode.BUSY, message, retry_after_ms=1000)
        name = clip(request.client)[:MAX_CLIENT_NAME]
        session = Session(next(self._numbers), self._tenant, name, secrets.token_bytes(TOKEN_BYTES))
        self._service.session_opened(session)
        self.opened_total += 1
        peer = Peer(rid, session, self._clock.now_ns())
        self.by_rid[rid] = self._by_token[session.token] = peer
        return peer

    def _room(self) -> int:
        """How many more sessions may be opened."""
        return self._limits.max_sessions - len(self)

    def end(self, peer: Peer) -> None:
        """Forget a session and tell the service that its sockets are gone; a second call does nothing."""
        if self._by_token.pop(peer.session.token, None) is None:
            return
        self.by_rid.pop(peer.rid, None)
        for task in peer.tasks:
            task.cancel()
        self._service.session_detached(peer.session)
        self._on_end(peer.session)

    def end_idle(self) -> None:
        """End sessions that were silent too long; the kernel tells us when an attached one ends."""
        oldest_ns = self._clock.now_ns() - int(self._limits.session_idle_s * 1e9)
        for peer in self:
            if peer.seen_ns < oldest_ns and not peer.session.attached and not peer.tasks:
                self.end(peer)

    def end_gone(self) -> None:
        """End sessions whose client has closed its connection."""
        self._probed_ns = now_ns = self._clock.now_ns()
        for peer in self:
            silent = now_ns - peer.seen_ns > PROBE_NS
            if silent and not peer.session.attached and not self._is_reachable(peer.rid):
                self.end(peer)
