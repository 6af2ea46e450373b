"""The daemon stops, dies, comes back, or was never there: the answers stay the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtierd import Client
from kvtierd.connectors.transformers import PrefixStore
from kvtierd.daemon.embedded import EmbeddedDaemon

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

BLOCK = 32
GREEDY = {"max_new_tokens": 8, "do_sample": False}
MORE = {"max_new_tokens": 32, "do_sample": False}
NewStore = Callable[..., PrefixStore]
Plain = Callable[..., torch.Tensor]


class AfterTokens:
    """A streamer that does something when so many new tokens are there."""

    def __init__(self, count: int, action: Callable[[], None]) -> None:
        self._left = count + 1
        self._action = action

    def put(self, _value: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._action()

    def end(self) -> None:
        pass


def test_after_a_restart_the_prefix_comes_from_the_disk(
    new_store: NewStore,
    daemon: EmbeddedDaemon,
    await_daemon: Callable[[], None],
    plain: Plain,
    text_ids: torch.Tensor,
) -> None:
    store, prompt = new_store(), text_ids[:, :300]
    cold = plain(prompt, **MORE)
    store.generate(prompt, **GREEDY)
    daemon.restart()
    await_daemon()
    restored = store.restore(prompt)
    assert (restored.tokens, restored.sources) == (9 * BLOCK, {"nvme": 9})
    assert torch.equal(store.generate(prompt, **MORE), cold)


def test_flushed_blocks_survive_a_daemon_that_was_killed(
    new_store: NewStore,
    client: Client,
    daemon: EmbeddedDaemon,
    await_daemon: Callable[[], None],
    plain: Plain,
    text_ids: torch.Tensor,
) -> None:
    store, prompt = new_store(), text_ids[:, :200]
    cold = plain(prompt, **GREEDY)
    store.generate(prompt, **GREEDY)
    client.flush()
    daemon.kill()
    daemon.start()
    await_daemon()
    assert store.restore(prompt).tokens == 6 * BLOCK
    assert torch.equal(store.generate(prompt, **GREEDY), cold)


@pytest.mark.parametrize("tokens", [1, 6])
def test_a_daemon_killed_in_the_midst_changes_nothing(
    tokens: int,
    new_store: NewStore,
    daemon: EmbeddedDaemon,
    await_daemon: Callable[[], None],
    plain: Plain,
    text_ids: torch.Tensor,
) -> None:
    store, prompt = new_store(), text_ids[:, :200]
    cold = plain(prompt, **GREEDY)
    try:
        output = store.generate(prompt, **GREEDY, streamer=AfterTokens(tokens, daemon.kill))
        assert torch.equal(output, cold)
        assert torch.equal(store.generate(prompt, **GREEDY), cold)
        assert store.counters.refused_blocks
    finally:
        daemon.start()
        await_daemon()
    assert torch.equal(store.generate(prompt, **GREEDY), cold)


def test_without_a_daemon_everything_is_plain(model: Any, plain: Plain, text_ids: torch.Tensor, tmp_path: Path) -> None:
    prompt = text_ids[:, :100]
    with Client(f"ipc://{tmp_path}/nobody.sock") as client:
        store = PrefixStore(client, model, block_size=BLOCK)
        assert torch.equal(store.generate(prompt, **GREEDY), plain(prompt, **GREEDY))
        assert store.counters.restored_tokens == 0
        assert store.counters.refused_blocks == 3 + 3  # the prompt after its first step, then all of it again
        assert client.counters["lookups_missed_unavailable"]


def test_a_full_host_tier_stores_a_leading_run_or_nothing(
    model: Any, plain: Plain, text_ids: torch.Tensor, tmp_path: Path
) -> None:
    # Room for one chunk of 11 blocks and no disk to move them to: the rest is refused, the prefix has no hole.
    settings = {"host__capacity": "16MiB", "host__chunk_bytes": "16MiB", "gpu__capacity": 0, "nvme__directory": ""}
    prompt = text_ids[:, :700]
    with EmbeddedDaemon(tmp_path, **settings) as small, Client(small.endpoint, timeout_s=20) as client:
        store = PrefixStore(client, model, block_size=BLOCK)
        while not client.stats()["host_ready_bytes"]:
            time.sleep(0.05)
        assert torch.equal(store.generate(prompt, **GREEDY), plain(prompt, **GREEDY))
        assert store.counters.refused_blocks
        found = store.restore(prompt).tokens
        assert 0 <= found <= 11 * BLOCK
        assert torch.equal(store.generate(prompt, **GREEDY), plain(prompt, **GREEDY))
