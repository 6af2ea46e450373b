"""The daemon dies, comes back, runs out of room or loses a block: the same tokens, or an error, never other tokens."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvtierd import Client
from kvtierd.connectors.transformers import OffloadedCache, OffloadError
from kvtierd.daemon.embedded import EmbeddedDaemon

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

GREEDY = {"max_new_tokens": 10, "do_sample": False}
NewCache = Callable[..., OffloadedCache]
Plain = Callable[..., torch.Tensor]


class AfterTokens:
    """A streamer that does something when so many new tokens are there."""

    def __init__(self, count: int, action: Callable[[], object]) -> None:
        self._left = count + 1
        self._action = action

    def put(self, _value: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._action()

    def end(self) -> None:
        pass


def test_a_restart_in_the_midst_of_a_generation_changes_nothing(
    new_cache: NewCache, offloaded_model: Any, plain: Plain, text_ids: torch.Tensor, daemon: EmbeddedDaemon
) -> None:
    prompt = text_ids[:, :310]
    expected = plain(prompt, **GREEDY)
    cache = new_cache(timeout_s=60)
    found = offloaded_model.generate(prompt, past_key_values=cache, streamer=AfterTokens(3, daemon.restart), **GREEDY)
    assert torch.equal(found, expected)
    assert cache.offloaded_tokens == [224]


def test_without_a_daemon_there_is_an_error_and_no_token_and_later_it_goes_on(
    new_cache: NewCache,
    offloaded_model: Any,
    plain: Plain,
    text_ids: torch.Tensor,
    daemon: EmbeddedDaemon,
    await_daemon: Callable[[], None],
) -> None:
    prompt = text_ids[:, :310]
    expected = plain(prompt, **GREEDY)
    cache = new_cache()

    def kill() -> None:
        cache.blocks.timeout_s = 0.5
        daemon.kill()

    try:
        with pytest.raises(OffloadError, match="cannot be reached; the past of this generation is there"):
            offloaded_model.generate(prompt, past_key_values=cache, streamer=AfterTokens(3, kill), **GREEDY)
        length = cache.get_seq_length()
        assert 310 <= length <= 313
    finally:
        daemon.start()
    await_daemon()
    cache.blocks.timeout_s = 60
    # What was computed before is kept; asked for the rest, it answers the same.
    rest = {**GREEDY, "max_new_tokens": 320 - length - 1}
    assert torch.equal(offloaded_model.generate(expected[:, : length + 1], past_key_values=cache, **rest), expected)


def test_rows_that_moved_while_the_daemon_was_away_are_followed_later(
    new_cache: NewCache,
    offloaded_model: Any,
    model: Any,
    text_ids: torch.Tensor,
    daemon: EmbeddedDaemon,
    await_daemon: Callable[[], None],
) -> None:
    cache, plain = new_cache(), DynamicCache(config=model.config)
    fork = torch.cat([text_ids[:, :100], text_ids[:, 300:400]], dim=1)
    both = torch.cat([text_ids[:, :200], fork])
    token, other = both[:, -1:], torch.tensor([1, 1])  # what the rows share, and what row 1 has, becomes one run
    with torch.no_grad():
        offloaded_model(input_ids=both, past_key_values=cache, use_cache=True)
        model(input_ids=both, past_key_values=plain, use_cache=True)
        plain.reorder_cache(other)
        expected = model(input_ids=token, past_key_values=plain, use_cache=True).logits
        cache.blocks.timeout_s = 0.3
        daemon.kill()
        try:
            with pytest.raises(OffloadError):
                cache.reorder_cache(other)
        finally:
            daemon.start()
        await_daemon()
        cache.blocks.timeout_s = 60
        found = offloaded_model(input_ids=token, past_key_values=cache, use_cache=True).logits
    assert float((found - expected).abs().max()) < 1e-3


def test_a_damaged_block_is_an_error(tmp_path: Path, offloaded_model: Any, text_ids: torch.Tensor) -> None:
    """Bytes of one layer of a block that lies on the disk only are flipped."""
    settings = {"host__capacity": "64MiB", "gpu__capacity": 0, "nvme__capacity": "512MiB", "nvme__scrub_rate": 0}
    with running(tmp_path, offloaded_model, **settings) as (daemon, client, cache):
        with torch.no_grad():
            offloaded_model(input_ids=text_ids[:, :200], past_key_values=cache, use_cache=True)
        cache._rows.past.close()  # let go of the copies in host
        client.purge(tiers=["host"])
        cache._rows.past.follow(cache._rows.table.runs())
        damage(daemon.data_dir, skip=3 * (1 << 20))
        with torch.no_grad(), pytest.raises(OffloadError, match="damaged"):
            offloaded_model(input_ids=text_ids[:, 200:201], past_key_values=cache, use_cache=True)
        assert cache.get_seq_length() == 200


def test_without_nvme_blocks_are_pinned_and_too_many_are_an_error(
    tmp_path: Path, offloaded_model: Any, plain: Plain, text_ids: torch.Tensor
) -> None:
    prompt = text_ids[:, :310]
    settings = {"host__capacity": "64MiB", "host__chunk_bytes": "8MiB", "gpu__capacity": 0, "nvme__directory": ""}
    with running(tmp_path, offloaded_model, **settings) as (_, client, cache):
        found = offloaded_model.generate(prompt, past_key_values=cache, **GREEDY)
        assert torch.equal(found, plain(prompt, **GREEDY))
        assert cache.blocks.pinned == cache.offloaded_blocks == 7
        with pytest.raises(OffloadError, match=r"neither in nvme nor pinned in host|no room in host"):
            offloaded_model.generate(text_ids[:, :900], past_key_values=cache, **GREEDY)
        assert cache.get_seq_length() == 310 + 9
        cache.close()
        assert client.stats()["pinned_bytes"] == 0


def test_what_a_dropped_cache_left_behind_goes_with_the_next_one(
    new_cache: NewCache, client: Client, offloaded_model: Any, text_ids: torch.Tensor
) -> None:
    before = client.stats()["index_blocks"]
    dropped = OffloadedCache(client, offloaded_model, block_size=32, tail_tokens=64)
    with torch.no_grad():
        offloaded_model(input_ids=text_ids[:, :200], past_key_values=dropped, use_cache=True)
        assert client.stats()["index_blocks"] == before + 4
        del dropped
        gc.collect()
        cache = new_cache()
        offloaded_model(input_ids=text_ids[:, :200], past_key_values=cache, use_cache=True)
    assert client.stats()["index_blocks"] == before + 4


class running:  # noqa: N801 - read as a word
    """A daemon of its own, a client and a cache."""

    def __init__(self, folder: Path, model: Any, **settings: Any) -> None:
        self._daemon = EmbeddedDaemon(folder, **settings)
        self._model = model

    def __enter__(self) -> tuple[EmbeddedDaemon, Client, OffloadedCache]:
        self._daemon.__enter__()
        self._client = Client(self._daemon.endpoint, timeout_s=20, transfer_timeout_s=20)
        give_up_s = time.monotonic() + 90
        while (stats := self._client.stats())["host_ready_bytes"] < stats["host_capacity_bytes"]:
            assert time.monotonic() < give_up_s
            time.sleep(0.02)
        self._cache = OffloadedCache(self._client, self._model, block_size=32, tail_tokens=64, timeout_s=20)
        return self._daemon, self._client, self._cache

    def __exit__(self, *_: object) -> None:
        self._cache.close()
        self._client.close()
        self._daemon.close()


def damage(folder: Path, skip: int) -> None:
    """Flip a byte in every page of the first segment behind its head."""
    segment = min(folder.glob("segment-*"))
    data = bytearray(segment.read_bytes())
    for at in range(skip, len(data), 4096):
        data[at] ^= 0xFF
    segment.write_bytes(data)
