"""The contract between the server, which owns sockets, and whoever answers requests (kvtierd.tiers)."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from kvtierd.protocol.messages import AnyReply, AnyRequest

Frame = bytes | bytearray | memoryview
"""A raw payload frame on its way out; arrays go in as `array.data`."""


class RequestQuota(Protocol):
    """How many requests of a tenant may be worked on. `count`, and how many were refused, are kept by the server."""

    count: int
    refused: int

    @property
    def full(self) -> bool:
        """Whether no more may be taken up now."""
        ...


@dataclasses.dataclass(slots=True)
class Session:
    """One client as the daemon knows it, from Hello until its process or its socket is gone.

    `pid`, `uid` and `pidfd` are the kernel's word, known once the client has attached to the arena socket (-1
    before). `state` belongs to the service. `quarantined` is how many of its write reservations the service still
    holds for a process that lives; at 0 nobody has to wait for the end of the process, -1 says "not told". `quota` is
    shared by the sessions of a tenant, where it has one.
    """

    id: int
    tenant: str
    client: str
    token: bytes
    pid: int = -1
    uid: int = -1
    pidfd: int = -1
    state: Any = None
    quarantined: int = -1
    quota: RequestQuota | None = None

    @property
    def attached(self) -> bool:
        """Whether the client may use the arena."""
        return self.pidfd >= 0


@dataclasses.dataclass(slots=True)
class Answer:
    """A reply with its raw frames. The server fills in `id` and `epoch` of the reply.

    With `on_sent` large frames leave without a copy: they must not change until it is called, once, on the loop, when
    ZeroMQ is done with them or the reply was dropped. Without it a frame that is not `bytes` is copied.
    """

    reply: AnyReply
    frames: Sequence[Frame] = ()
    on_sent: Callable[[], None] | None = None


class Service(Protocol):
    """Answers requests. Every method runs on the loop.

    `handle` returns an Answer at once where it can (lookups), or an awaitable where copies or disks are involved;
    the server bounds how many of those one session has in flight and enforces the deadline. It raises RequestError for
    input that cannot be served. It must leave nothing behind when its awaitable is cancelled, also before its first
    step. A reservation or a lease whose answer could not be delivered is given back by the server (Abort, Release).
    """

    def handle(self, session: Session, request: AnyRequest, frames: Sequence[memoryview]) -> Answer | Awaitable[Answer]:
        """Serve one request; `frames` are views that stay valid until the answer is sent."""
        ...

    def session_opened(self, session: Session) -> None:
        """A client said Hello; raises RequestError `busy` when there are too many."""
        ...

    def session_detached(self, session: Session) -> None:
        """The client's sockets are gone or it fell silent, but its process may live and hold mappings.

        Leases and pins end; its write reservations are quarantined until `process_gone`.
        """
        ...

    def process_gone(self, session: Session) -> None:
        """The process behind an attached session has ended: nothing of it can touch memory any more."""
        ...


class Observer(Protocol):
    """Told of every request that reached the service, once, when its answer or its error is known."""

    def __call__(
        self,
        session: Session,
        request: AnyRequest,
        frames: Sequence[memoryview],
        begin_ns: int,
        outcome: AnyReply | str,
    ) -> None:
        """`begin_ns` is when it was taken up (CLOCK_MONOTONIC), `outcome` its reply or the code of its error."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkFiles:
    """What the arena socket hands out for one chunk."""

    chunk: int
    chunk_bytes: int
    slot_bytes: int
    slots: int
    data_fd: int
    generations_fd: int
    generations_first: int = 0


class ChunkSource(Protocol):
    """Where the arena socket gets a chunk's descriptors."""

    def chunk_files(self, session: Session, chunk: int) -> ChunkFiles | None:
        """The files of a chunk of this session's tenant, or None when there is no such chunk for it."""
        ...
