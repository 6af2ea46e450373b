"""How a client asks: steps for a driver, and what every plan does with a session and a reply (no I/O here).

An operation is a generator, a *plan*: it yields what to do next and is sent the outcome. The sync and the async client
drive the same plans. A daemon that is absent, late or out of room is a miss or a dropped store, counted; only what the
caller did wrong raises.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import numpy as np

from kvtierd.core.errors import ErrorCode, KvtierdError, RequestError
from kvtierd.core.keys import Keys, as_keys
from kvtierd.protocol.connection import Connection, Unavailable
from kvtierd.protocol.endpoint import why_silent
from kvtierd.protocol.messages import (
    AnyReply,
    AnyRequest,
    ErrorReply,
    NamespaceReply,
    RegisterNamespace,
)
from kvtierd.protocol.pending import Group, Pending, Received
from kvtierd.protocol.results import NamespaceHandle
from kvtierd.protocol.service import Frame

_TEMPORARY = frozenset(
    {
        ErrorCode.BUSY,
        ErrorCode.DEADLINE,
        ErrorCode.UNAVAILABLE,
        ErrorCode.SHUTTING_DOWN,
        ErrorCode.INTERNAL,
        ErrorCode.STALE_EPOCH,
        ErrorCode.NO_SESSION,
    }
)
"""Errors that are the daemon's state and no mistake of the caller."""
_SESSION_LOST = frozenset({ErrorCode.STALE_EPOCH, ErrorCode.NO_SESSION})


@dataclasses.dataclass(slots=True)
class Connect:
    """Have a session; the outcome is whether there is one.

    `insist` waits for a daemon that is away until the deadline; otherwise only the first try waits for it.
    """

    deadline_ns: int
    insist: bool = False


@dataclasses.dataclass(slots=True)
class Ask:
    """Send requests and wait for their replies; the outcome is a list with None for each that stayed out.

    They name things of session `session_no` and are not sent in another one.
    """

    requests: Sequence[tuple[AnyRequest, Sequence[Frame]]]
    session_no: int
    deadline_ns: int


@dataclasses.dataclass(slots=True)
class Begun:
    """Requests that were sent; their replies come in while the caller does something else."""

    ask: Ask
    group: Group
    pending: list[Pending]

    def received(self) -> list[Received | None]:
        """What has come, with None for each reply that stayed out."""
        missing = len(self.ask.requests) - len(self.pending)
        return [item.received for item in self.pending] + [None] * missing


@dataclasses.dataclass(slots=True)
class Begin:
    """Send requests without waiting; the outcome is Begun, which must be finished or dropped."""

    ask: Ask


@dataclasses.dataclass(slots=True)
class Finish:
    """Wait for what was begun; the outcome is that of its Ask."""

    begun: Begun


@dataclasses.dataclass(slots=True)
class Work:
    """Call something that copies or blocks; the outcome is what it returns."""

    function: Callable[[], Any]


Step = Connect | Ask | Begin | Finish | Work
T = TypeVar("T")
R = TypeVar("R", bound=AnyReply)
Plan = Generator[Step, Any, T]


class Asking:
    """What all plans share: one connection and its counters."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.counters = connection.counters

    def ready(
        self, handles: Sequence[NamespaceHandle], deadline_ns: int, *, insist: bool = False
    ) -> Plan[tuple[int, list[int]] | None]:
        """Have a session: which, and the numbers of these namespaces in it; None where the daemon is away."""
        connection = self.connection
        if not connection.up and not (yield Connect(deadline_ns, insist)):
            return None
        session_no, numbers = connection.session_no, connection.numbers
        if todo := [handle for handle in handles if handle.identity not in numbers]:
            received = yield Ask([(_registration(handle), ()) for handle in todo], session_no, deadline_ns)
            for handle, item in zip(todo, received, strict=True):
                reply = self.accept(item, NamespaceReply)
                if reply is None:
                    return None
                if reply.digest != handle.digest:
                    message = f"the daemon derives another digest for {handle.namespace.model!r}: versions do not match"
                    raise KvtierdError(message)
                numbers[handle.identity] = reply.namespace
        return session_no, [numbers[handle.identity] for handle in handles]

    def request(
        self,
        handles: Sequence[NamespaceHandle],
        build: Callable[[list[int]], AnyRequest],
        frames: Sequence[Frame],
        deadline_ns: int,
        *,
        prepare: Callable[[int], Plan[bool]] | None = None,
        insist: bool = False,
    ) -> Plan[Received | None]:
        """Ask one thing; once more, or with `insist` until the deadline, where the daemon was away or is a new one.

        With `insist` nothing is asked again of the next daemon that the one before has taken and not answered: what was
        promised of blocks of that one, this one cannot know. `build` makes the request from the namespaces' numbers;
        `prepare` says whether the session will do.
        """
        first: Received | None = None
        for attempt in itertools.count():
            ready = yield from self.ready(handles, deadline_ns, insist=insist)
            if ready is None:
                return None
            session_no, numbers = ready
            if prepare is not None and not (yield from prepare(deadline_ns)):
                return None
            hang_ups = self.counters["hang_ups"]
            received: list[Received | None] = yield Ask([(build(numbers), frames)], session_no, deadline_ns)
            first = received[0]
            if insist and self.counters["hang_ups"] != hang_ups:
                break
            if not self.undelivered(first, deadline_ns) or (attempt and not insist):
                break
        return first

    def begin(
        self,
        handles: Sequence[NamespaceHandle],
        build: Callable[[list[int]], AnyRequest],
        frames: Sequence[Frame],
        deadline_ns: int,
        *,
        prepare: Callable[[int], Plan[bool]] | None = None,
    ) -> Plan[Begun | None]:
        """Send what `request` would and do not wait; None where the daemon is away."""
        ready = yield from self.ready(handles, deadline_ns)
        if ready is None or (prepare is not None and not (yield from prepare(deadline_ns))):
            return None
        session_no, numbers = ready
        begun: Begun = yield Begin(Ask([(build(numbers), frames)], session_no, deadline_ns))
        return begun

    def drop(self, begun: Begun) -> Plan[None]:
        """Nobody wants the replies any more: wait for them and give back what they granted.

        One that stays out is given back when it comes.
        """
        yield Finish(begun)
        self.let_go(begun)

    def let_go(self, begun: Begun) -> None:
        """As `drop`, without waiting."""
        with self.connection.lock:
            self.connection.waited.forget(begun.group)
            for item in begun.received():
                if item is not None and item[2] == self.connection.session_no:
                    self.connection.give_back_granted(item[0])
            self.connection.drain()

    def undelivered(self, received: Received | None, deadline_ns: int) -> bool:
        """Whether a request reached no session: the daemon was away, or is another one now. Asking again is safe."""
        if received is None:
            return not self.connection.closed and time.monotonic_ns() < deadline_ns
        return isinstance(received[0], ErrorReply) and received[0].code in _SESSION_LOST

    def accept(self, received: Received | None, kind: type[R]) -> R | None:
        """The reply, or None for a daemon that cannot now. Raises RequestError for a mistake of the caller."""
        if received is None:
            return None
        reply = received[0]
        if type(reply) is kind:
            return reply
        if isinstance(reply, ErrorReply):
            if reply.code in _TEMPORARY:
                self.counters[f"errors_{reply.code}"] += 1
                return None
            raise RequestError(reply.code, reply.message, reply.retry_after_ms)
        raise KvtierdError(f"the daemon answered {type(reply).__name__} where {kind.__name__} belongs")

    def insist(self, received: Received | None, kind: type[R]) -> R:
        """The reply. Raises Unavailable where there is none."""
        reply = self.accept(received, kind)
        if reply is not None:
            return reply
        if received is not None and isinstance(received[0], ErrorReply):
            raise Unavailable(
                f"the daemon at {self.connection.endpoint} says {received[0].code}: {received[0].message}"
            )
        refusal = self.connection.refusal
        reason = f"it refused this client: {refusal}" if refusal else why_silent(self.connection.endpoint)
        raise Unavailable(f"no daemon at {self.connection.endpoint}: {reason}")


def as_frame(keys: Keys | bytes | memoryview) -> memoryview:
    """Keys as one contiguous frame; ValueError when they are no keys."""
    flat = as_keys(keys)
    return raw(np.ascontiguousarray(flat)) if flat.size else memoryview(b"")


def raw(array: np.ndarray[Any, Any]) -> memoryview:
    """A contiguous array as a frame."""
    return array.reshape(-1).view(np.uint8).data


def _registration(handle: NamespaceHandle) -> RegisterNamespace:
    return RegisterNamespace(
        id=0,
        namespace=handle.namespace,
        block_bytes=handle.geometry.block_bytes,
        allow_loss=handle.allow_loss,
        ttl_s=handle.ttl_s,
    )
