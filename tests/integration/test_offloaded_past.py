"""The past of a generation through a real daemon, without an engine: stored for sure, attended to, forgotten."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import numpy as np
import pytest

from kvtierd import Client, Unavailable
from kvtierd.connectors.kv_layout import LayerKv
from kvtierd.connectors.offloaded_past import Past
from kvtierd.connectors.offloaded_store import NewBlock, OffloadedBlocks, OffloadError
from kvtierd.connectors.offloaded_table import BlockTable
from kvtierd.core.geometry import Geometry
from kvtierd.core.units import MIB
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.gpu.reference.attention import reference_attention, relative_error

SHAPE = Geometry(block_size=64, layers=2, kv_heads=2, k_dim=64, v_dim=64, dtype="fp32")
HEADS = 4
SMALL = {"host__capacity": 2 * MIB, "host__chunk_bytes": MIB, "gpu__capacity": 0}
"""Host holds 14 blocks of 128 KiB."""


def kv_of(number: int) -> list[LayerKv]:
    """A block's KV: normal deviates of its own."""
    rng = np.random.default_rng(number)
    sizes = (SHAPE.kv_heads, SHAPE.block_size, SHAPE.k_dim)
    return [
        LayerKv(*(rng.standard_normal(sizes).astype(np.float32).view(np.uint32) for _ in range(2)))
        for _ in range(SHAPE.layers)
    ]


def fresh(numbers, parent: int | None = None) -> list[NewBlock]:
    parents = [parent, *numbers.tolist()]
    return [NewBlock(n, p, functools.partial(kv_of, n)) for n, p in zip(numbers.tolist(), parents, strict=False)]


def connect(daemon: EmbeddedDaemon) -> Client:
    client = Client(daemon.endpoint, timeout_s=5, transfer_timeout_s=10)
    while (stats := client.stats())["host_ready_bytes"] < stats["host_capacity_bytes"]:
        time.sleep(0.01)
    return client


def made(client: Client, timeout_s: float = 20) -> OffloadedBlocks:
    return OffloadedBlocks(client, "past", SHAPE, timeout_s=timeout_s, ttl_s=60)


def reference(q, numbers, layer: int):
    blocks = []
    for place, number in enumerate(numbers):
        kv = kv_of(number)[layer]
        k, v = (part.view(np.float32).astype(np.float64).swapaxes(0, 1) for part in kv)
        blocks.append((k, v, place * SHAPE.block_size))
    return reference_attention(
        q, blocks, scale=0.125, v_dim=SHAPE.v_dim, position=None, window=0, soft_cap=0.0, sinks=None
    )


def attend(past: Past, q, layer: int):
    output = np.zeros((*q.shape[:3], SHAPE.v_dim), np.float32)
    lse = np.full(q.shape[:3], -np.inf, np.float32)
    pending = past.begin(layer, q, 0.125)
    pending.merge_into(output, lse)
    pending.close()
    return output, lse


def test_more_blocks_than_host_holds_are_all_there_and_rows_share_what_they_have_in_common(tmp_path: Path) -> None:
    with EmbeddedDaemon(tmp_path, **SMALL) as daemon, connect(daemon) as client:
        blocks = made(client)
        table, past = BlockTable(3), Past(blocks)
        trunk = blocks.new(60)
        blocks.store(fresh(trunk))
        for row in (0, 1):
            table.append(row, trunk)
        past.follow(table.runs())
        own = blocks.new(20)
        blocks.store(fresh(own, int(trunk[-1])))
        table.append(1, own)
        past.follow(table.runs())
        assert client.stats()["sequences"] == 2
        rows = [trunk.tolist(), [*trunk.tolist(), *own.tolist()], []]
        q = np.random.default_rng(1).standard_normal((3, 2, HEADS, SHAPE.k_dim)).astype(np.float32)
        for layer in range(SHAPE.layers):
            output, lse = attend(past, q, layer)
            for row in (0, 1):
                expected, expected_lse = reference(q[row], rows[row], layer)
                assert relative_error(output[row], expected) <= 1e-5
                assert np.allclose(lse[row], expected_lse, atol=1e-4)
            assert not output[2].any()
            assert np.isneginf(lse[2]).all()
        assert past.counters["attends"] == 2 * SHAPE.layers, "one request for each run, whatever goes through it"
        assert [part.k.tolist() for part in blocks.read(int(own[3]))] == [
            part.k.tolist() for part in kv_of(int(own[3]))
        ]
        table.select(np.array([0, 0]))
        past.follow(table.runs())
        blocks.retain(table.live())
        assert blocks.count == 60
        past.close()
        blocks.retain(np.empty(0, np.int64))
        client.ping()
        assert (client.stats()["sequences"], client.stats()["index_blocks"]) == (0, 0)


def test_a_run_that_can_not_be_extended_is_opened_anew(tmp_path: Path) -> None:
    """An answer that did not come leaves a sequence in the daemon that knows more blocks than its client."""
    with EmbeddedDaemon(tmp_path, **SMALL) as daemon, connect(daemon) as client:
        blocks = made(client)
        table, past = BlockTable(1), Past(blocks)
        numbers = blocks.new(6)
        blocks.store(fresh(numbers))
        table.append(0, numbers[:4])
        past.follow(table.runs())
        (opened,) = past._open.values()
        plans = opened.sequence._plans
        opened.sequence.extend(blocks.keys(numbers[4:]))
        plans._keys.pop()  # as if that had not been answered
        table.append(0, numbers[4:])
        past.follow(table.runs())
        q = np.ones((1, 1, HEADS, SHAPE.k_dim), np.float32)
        assert relative_error(attend(past, q, 1)[0][0], reference(q[0], numbers.tolist(), 1)[0]) <= 1e-5
        assert past.counters["sequences"] == 2


def test_a_change_that_fails_half_way_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run was extended when another could not be opened: attention is over what it was over before."""
    with EmbeddedDaemon(tmp_path, **SMALL) as daemon, connect(daemon) as client:
        blocks = made(client)
        table, past = BlockTable(2), Past(blocks)
        one, two, more = blocks.new(3), blocks.new(2), blocks.new(2)
        for numbers in (one, two, more):
            blocks.store(fresh(numbers))
        table.append(0, one)
        past.follow(table.runs())
        q = np.random.default_rng(4).standard_normal((2, 1, HEADS, SHAPE.k_dim)).astype(np.float32)
        table.append(0, more)
        table.append(1, two)

        def refuse(*_arguments: object, **_options: object) -> None:
            raise Unavailable("not now")

        with monkeypatch.context() as patched:
            patched.setattr(client, "open_sequence", refuse)
            patched.setattr(blocks, "timeout_s", 0.1)
            with pytest.raises(OffloadError, match="not now"):
                past.follow(table.runs())
        output, lse = attend(past, q, 0)
        assert relative_error(output[0], reference(q[0], one.tolist(), 0)[0]) <= 1e-5
        assert np.isneginf(lse[1]).all()
        past.follow(table.runs())
        output, _ = attend(past, q, 0)
        for row, numbers in enumerate((np.concatenate([one, more]), two)):
            assert relative_error(output[row], reference(q[row], numbers.tolist(), 0)[0]) <= 1e-5
        past.close()
        client.ping()
        assert client.stats()["sequences"] == 0


def test_without_nvme_blocks_are_pinned_as_far_as_pins_go(tmp_path: Path) -> None:
    with EmbeddedDaemon(tmp_path, nvme__directory="", **SMALL) as daemon, connect(daemon) as client:
        blocks = made(client, timeout_s=0.5)
        numbers = blocks.new(6)
        blocks.store(fresh(numbers))
        assert blocks.pinned == 6
        with pytest.raises(OffloadError, match=r"neither in nvme nor pinned in host \(.*leases.max_pinned_share"):
            blocks.store(fresh(blocks.new(4), int(numbers[-1])))
        assert blocks.read(int(numbers[0]))[0].v.tolist() == kv_of(int(numbers[0]))[0].v.tolist()
        blocks.retain(np.empty(0, np.int64))
        assert (client.stats()["pinned_bytes"], client.stats()["index_blocks"]) == (0, 0)


def test_a_daemon_that_is_away_is_waited_for_and_then_an_error(tmp_path: Path) -> None:
    with EmbeddedDaemon(tmp_path, **SMALL) as daemon, connect(daemon) as client:
        blocks = made(client, timeout_s=0.5)
        table, past = BlockTable(1), Past(blocks)
        numbers = blocks.new(30)
        blocks.store(fresh(numbers))
        table.append(0, numbers)
        past.follow(table.runs())
        q = np.ones((1, 1, HEADS, SHAPE.k_dim), np.float32)
        before = attend(past, q, 0)[0]
        daemon.kill()
        for call in (
            lambda: attend(past, q, 0),
            lambda: blocks.store(fresh(blocks.new(1), int(numbers[-1]))),
            lambda: blocks.read(0),
            lambda: Past(blocks).follow(table.runs()),
        ):
            with pytest.raises(OffloadError):
                call()
        daemon.start()
        blocks.timeout_s = 30
        assert relative_error(attend(past, q, 0)[0], before) <= 1e-5, "what was stored is durable"
