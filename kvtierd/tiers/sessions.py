"""What the tiers remember of one client, and how a request's frames become arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvtierd.core.checksum import Sums
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.keys import KEY_BYTES, Keys
from kvtierd.protocol.messages import MAX_BATCH
from kvtierd.protocol.service import Session
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.requests import Requests

MAX_SESSION_NAMESPACES = 4096


@dataclasses.dataclass(slots=True)
class SessionState:
    """A client's numbers for its namespaces (position + 1), what it pinned (key to namespace and host slot), and its
    last requests."""

    namespaces: list[NamespaceEntry] = dataclasses.field(default_factory=list)
    pins: dict[bytes, tuple[NamespaceEntry, int]] = dataclasses.field(default_factory=dict)
    requests: Requests = dataclasses.field(default_factory=Requests)
    ended: bool = False

    def number_of(self, entry: NamespaceEntry) -> int:
        """The session's number of a namespace, given anew the first time."""
        if entry in self.namespaces:
            return self.namespaces.index(entry) + 1
        if len(self.namespaces) >= MAX_SESSION_NAMESPACES:
            raise RequestError(
                ErrorCode.BUSY, f"this session uses {MAX_SESSION_NAMESPACES} namespaces; open another one"
            )
        self.namespaces.append(entry)
        return len(self.namespaces)


def state_of(session: Session) -> SessionState:
    """The tiers' part of a session."""
    state = session.state
    assert isinstance(state, SessionState), "session_opened was not called"
    return state


def namespace_of(session: Session, number: int) -> NamespaceEntry:
    """The namespace behind a session's number; RequestError `unknown_namespace`."""
    known = state_of(session).namespaces
    if not 1 <= number <= len(known):
        raise RequestError(ErrorCode.UNKNOWN_NAMESPACE, f"namespace {number} is not registered in this session")
    return known[number - 1]


def keys_of(frame: memoryview) -> Keys:
    """Keys of a frame, [n, 32], a view. RequestError for a length that is no multiple of 32 or over the batch limit."""
    if frame.nbytes % KEY_BYTES:
        raise RequestError(ErrorCode.BAD_ARGUMENT, f"a keys frame has {frame.nbytes} bytes; a key has {KEY_BYTES}")
    count = frame.nbytes // KEY_BYTES
    if count > MAX_BATCH:
        raise RequestError(ErrorCode.BATCH_TOO_LARGE, f"{count} keys in one request; the limit is {MAX_BATCH}")
    return np.frombuffer(frame, np.uint8).reshape(count, KEY_BYTES)


def parent_of(key: bytes) -> Keys | None:
    """The key before the first one of a request, [1, 32]; None where the client did not say."""
    if not key:
        return None
    if len(key) != KEY_BYTES:
        raise RequestError(ErrorCode.BAD_ARGUMENT, f"parent has {len(key)} bytes; a key has {KEY_BYTES}")
    return np.frombuffer(key, np.uint8).reshape(1, KEY_BYTES)


def sums_of(frame: memoryview, count: int, layers: int, what: str) -> Sums:
    """Sums of a frame, [count, layers] u64. RequestError when the length is another."""
    wanted = count * layers * 8
    if frame.nbytes != wanted:
        raise RequestError(
            ErrorCode.BAD_ARGUMENT, f"the {what} frame has {frame.nbytes} bytes; {count} x {layers} u64 are {wanted}"
        )
    return np.frombuffer(frame, "<u8").reshape(count, layers)


def need_frames(frames: Sequence[memoryview], count: int) -> None:
    """RequestError unless there are exactly `count` frames behind the header."""
    if len(frames) != count:
        raise RequestError(ErrorCode.BAD_FRAMES, f"{len(frames)} frames follow the header; {count} are wanted")


def need_arena(session: Session) -> None:
    """RequestError unless the client has attached to the arena."""
    if not session.attached:
        raise RequestError(
            ErrorCode.BAD_ARGUMENT, "this needs the arena: attach to its socket first, or use put and get"
        )
