"""A daemon of another version is one that is away, until it is upgraded; and vLLM's KV events tell of blocks from when
the daemon has them. One engine for both: its start is what takes time."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvtierd.protocol import sessions
from kvtierd.protocol.client import Client
from kvtierd.protocol.endpoint import SOCKET_NAME
from kvtierd.protocol.messages import PROTOCOL_VERSION
from kvtierd.testing.fake_daemon import ThreadDaemon
from kvtierd.testing.waiting import wait_for

BLOCK_TOKENS = 128


class Router:
    """Hears an engine's events."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self.heard: list[dict[str, Any]] = []

    def listen(self) -> None:
        while self._socket.poll(100):
            _, events, *_ = msgspec.msgpack.decode(self._socket.recv_multipart()[-1])
            self.heard += events

    def stored(self, medium: str) -> list[dict[str, Any]]:
        """What was stored there."""
        self.listen()
        return [event for event in self.heard if event["type"] == "BlockStored" and event["medium"] == medium]

    def removed(self, medium: str) -> list[Any]:
        """Hashes of what is gone from there."""
        self.listen()
        gone = [event for event in self.heard if event["type"] == "BlockRemoved" and event["medium"] == medium]
        return [each for event in gone for each in event["block_hashes"]]

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A path of a socket has room in it."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as name:
        yield Path(name)


@pytest.fixture
def router(short_folder) -> Iterator[Router]:
    made = Router(f"ipc://{short_folder}/events")
    yield made
    made.close()


@pytest.fixture
def switch(short_folder) -> Callable[[Path], None]:
    """Where the engine's daemon is: a link to the folder of its socket."""

    def to(folder: Path) -> None:
        link = short_folder / "now"
        link.unlink(missing_ok=True)
        link.symlink_to(folder)

    return to


def test_daemon_of_another_version_then_one_whose_blocks_are_announced(
    start, make_daemon, short_folder, router, switch, text, whole, same, monkeypatch
):
    prompt = text[2000:2300]
    (short_folder / "newer").mkdir()
    engine = start(
        "events",
        dtype="float32",
        endpoint=f"ipc://{short_folder}/now/{SOCKET_NAME}",
        enable_prefix_caching=True,
        kv_events_config={"enable_kv_cache_events": True, "endpoint": f"ipc://{short_folder}/events"},
    )
    with contextlib.ExitStack() as stack:
        with monkeypatch.context() as patch, ThreadDaemon(short_folder / "newer"):
            patch.setattr(sessions, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
            switch(short_folder / "newer")
            stack.enter_context(engine)
            alone = goes_on_without_a_cache(engine, router, prompt)
        daemon = stack.enter_context(make_daemon("upgraded"))
        switch(Path(daemon.endpoint.removeprefix("ipc://")).parent)
        wait_for(lambda: "is back" in engine.log(), 60)
        assert engine.reset_prefix_cache()
        router.listen()
        router.heard.clear()
        again = blocks_are_announced_when_the_daemon_has_them(engine, router, daemon, prompt, whole)
        same(again, alone)
        blocks_are_told_to_be_gone_when_the_daemon_has_them_no_longer(engine, router, daemon, prompt)


def goes_on_without_a_cache(engine, router, prompt):
    alone = engine.answer(prompt)
    assert alone.cached == 0
    assert f"this daemon speaks {PROTOCOL_VERSION + 1}; prompts are computed meanwhile" in engine.log()
    assert len(router.stored("GPU")) > 0, "the engine's own cache"
    assert router.stored("CPU") == []
    return alone


def blocks_are_announced_when_the_daemon_has_them(engine, router, daemon, prompt, whole):
    engine.answer(prompt)
    daemon.await_blocks(whole(prompt) // BLOCK_TOKENS)
    engine.answer(prompt[:10], 4)  # events come with a step of the engine
    wait_for(lambda: len(router.stored("CPU")) > 0, 60)
    event = router.stored("CPU")[0]
    own = [each for each in router.stored("GPU") if each["token_ids"] == event["token_ids"]]
    assert event["token_ids"] == prompt[: whole(prompt)]
    assert event["parent_block_hash"] is None
    assert event["block_size"] == BLOCK_TOKENS
    assert [each["block_hashes"] for each in own] == [event["block_hashes"]], "a router sees one block in two places"
    assert engine.reset_prefix_cache()
    again = engine.answer(prompt)
    assert again.cached == whole(prompt)
    assert len(router.stored("CPU")) == 1, "what was found is not stored again"
    return again


def blocks_are_told_to_be_gone_when_the_daemon_has_them_no_longer(engine, router, daemon, prompt):
    told = router.stored("CPU")[0]["block_hashes"]
    assert router.removed("CPU") == []
    with Client(daemon.endpoint, timeout_s=20) as client:
        assert client.purge() > 0

    def heard() -> bool:
        engine.answer(prompt[:10], 4)  # events come with a step of the engine
        return len(router.removed("CPU")) > 0

    wait_for(heard, 60)
    assert sorted(router.removed("CPU")) == sorted(told)
