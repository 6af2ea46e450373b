"""A server with a fake service in a thread, and clients of it."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.geometry import Geometry
from kvtierd.core.keys import Keys, block_keys
from kvtierd.core.namespace import Namespace
from kvtierd.protocol.client import Client
from kvtierd.protocol.connection import Unavailable
from kvtierd.protocol.messages import AnyRequest
from kvtierd.protocol.service import Session
from kvtierd.testing.fake_daemon import ThreadDaemon
from kvtierd.testing.raw_client import RawClient

PADDED = Geometry(block_size=4, layers=3, kv_heads=2, k_dim=8, v_dim=4, dtype="fp32")
"""Layer parts of 384 bytes, so that every part has padding."""
EVEN = Geometry(block_size=16, layers=2, kv_heads=2, k_dim=64, v_dim=64)
"""Layer parts of 8 KiB: packed form and slot form are the same."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a Unix socket's has room for 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as path:
        yield Path(path)


@pytest.fixture
def daemon(folder: Path) -> Iterator[ThreadDaemon]:
    with ThreadDaemon(folder) as running:
        yield running


@pytest.fixture
def raw(daemon: ThreadDaemon) -> Iterator[RawClient]:
    """A bare connection that has said hello."""
    with RawClient(daemon.endpoint) as client:
        client.hello()
        yield client


@pytest.fixture
def connect(daemon: ThreadDaemon) -> Iterator[Callable[..., Client]]:
    """Make clients that wait long enough for a busy machine, and close them."""
    with ExitStack() as stack:

        def make(**options: object) -> Client:
            options = {"timeout_s": 20.0, "transfer_timeout_s": 20.0, **options}
            return stack.enter_context(Client(daemon.endpoint, **options))  # type: ignore[arg-type]

        yield make


@pytest.fixture(params=["arena", "frames"])
def client(request: pytest.FixtureRequest, connect: Callable[..., Client]) -> Client:
    """A client each way that blocks can travel, which has found the daemon.

    A client's first call waits a tenth of a second for a daemon that it cannot reach, and then goes on without one. On
    a machine with much else to do that is soon over.
    """
    made = connect(arena=request.param == "arena")
    give_up_s = time.monotonic() + 30
    while True:
        try:
            made.ping()
            return made
        except Unavailable:
            assert time.monotonic() < give_up_s, "the daemon was not found in 30 s"


@pytest.fixture(params=["padded", "even"])
def namespace(request: pytest.FixtureRequest) -> Namespace:
    return Namespace(model="m", geometry=PADDED if request.param == "padded" else EVEN)


def refuse_second(kind: type[AnyRequest]) -> Callable[[Session, AnyRequest], None]:
    """What a fake service does `before` it answers: it refuses the second request of a kind."""
    seen = 0

    def before(session: Session, request: AnyRequest) -> None:
        nonlocal seen
        del session
        if isinstance(request, kind):
            seen += 1
            if seen == 2:
                raise RequestError(ErrorCode.TOO_LARGE, "no")

    return before


def keys_of(namespace: Namespace, count: int, first_token: int = 0) -> Keys:
    size = namespace.geometry.block_size
    return block_keys(namespace.digest(), range(first_token, first_token + count * size), size)


def blocks_of(namespace: Namespace, count: int, seed: int = 0) -> np.ndarray:
    shape = (count, namespace.geometry.block_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in another thread or process; 20 s are for a busy machine."""
    for _ in range(4000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen")


class Gate:
    """Holds back one kind of request until it is opened."""

    def __init__(self, daemon: ThreadDaemon, kind: type[AnyRequest]) -> None:
        self._daemon = daemon
        self._kind = kind
        self.cancelled = 0
        self.waiting = 0
        self._event = daemon.call(asyncio.Event)
        daemon.service.before = self._before

    def _before(self, session: Session, request: AnyRequest) -> object:
        del session
        return self._wait() if isinstance(request, self._kind) else None

    async def _wait(self) -> None:
        self.waiting += 1
        try:
            await self._event.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def open(self) -> None:
        self._daemon.call(self._event.set)
