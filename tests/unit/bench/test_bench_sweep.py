"""The sweep of block sizes and windows: what each profile is measured with, and against."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from kvtierd.bench import sweep
from kvtierd.bench.catalogue import PARTS
from kvtierd.bench.options import Options
from kvtierd.bench.workload import daemon_and_client
from kvtierd.config.profiles import PROFILES


def test_profiles_are_those_of_the_configuration() -> None:
    assert set(sweep.PROFILES) == set(PROFILES)
    for name, values in PROFILES.items():
        mine = sweep.PROFILES[name]
        assert mine.block_size == int(values.get("kv_cache_config.block_size", sweep.DEFAULT[0]))
        assert mine.window == int(values.get("kv_cache_config.prefetch_window", sweep.DEFAULT[1]))
        settings = {key.replace(".", "__") for key in values if "compression" in key}
        assert settings == set(mine.settings)


@pytest.fixture
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemons that are the window they are started with, and loads that are arithmetic."""

    @contextlib.contextmanager
    def daemon(_: Options, kv_cache_config__prefetch_window: int, **settings: object):
        yield kv_cache_config__prefetch_window + (100 if settings else 0)

    monkeypatch.setattr(sweep, "_daemon", daemon)
    monkeypatch.setattr(sweep, "cold_read_of", lambda _: lambda: 1000.0)
    load = lambda client, size: lambda: float(size * 10 + client)  # noqa: E731
    profiles = {
        "long": sweep.Profile(512, 3, load),
        "lossy": sweep.Profile(128, 3, load, {"kv_cache_config__compression__threshold": 100}),
    }
    monkeypatch.setattr(sweep, "PROFILES", profiles)


@pytest.mark.usefixtures("_scripted")
def test_every_pair_is_a_row_and_the_profile_stands_beside_the_default() -> None:
    rows = list(sweep.rows(Options()))
    assert len(rows) == 2 * (16 + 1 + 1)
    assert [row.value for row in rows if row.metric.endswith("of 16 pairs measured")] == [16, 16]
    own = [row for row in rows if row.metric.endswith("its own settings")]
    assert own[0].ratio == pytest.approx(5123 / 1283)
    assert "best were blocks of 512, window 5" in own[0].reference_name
    assert own[1].ratio == pytest.approx((1283 + 100) / 1000), "what a lossy profile is beside is exact"
    assert [row.ok for row in own] == [True, True]


@pytest.mark.usefixtures("_scripted")
def test_quick_has_the_profiles_pair_and_the_default_one() -> None:
    metrics = {row.metric for row in sweep.rows(Options(quick=True))}
    assert {"long: blocks of 512, window 3", "long: blocks of 128, window 3", "long: its own settings"} <= metrics


def test_loads_read_what_they_stored_in_a_real_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "LONG_TOKENS", 1024)
    monkeypatch.setattr(sweep, "PROMPTS", 3)
    settings = {
        "gpu__capacity": 0,
        "host__capacity": 256 << 20,
        "host__chunk_bytes": 16 << 20,
        "nvme__capacity": 256 << 20,
        "nvme__segment_bytes": 16 << 20,
    }
    with daemon_and_client(tmp_path, 1, **settings) as (_, client):
        for name, profile in sweep.PROFILES.items():
            assert profile.load(client, 128)() > 0, name
        assert client.stats()["onboarded_blocks"] > 0


def test_the_parts_that_can_be_run_alone_are_the_profiles() -> None:
    assert PARTS["sweep"] == tuple(sweep.PROFILES)


@pytest.mark.usefixtures("_scripted")
def test_a_part_alone_has_its_rows_only() -> None:
    rows = list(sweep.rows(Options(only=("lossy",))))
    assert len(rows) == 16 + 1 + 1
    assert all(row.metric.startswith("lossy: ") for row in rows)


@pytest.mark.usefixtures("_scripted")
def test_a_profile_out_of_time_has_its_own_pair_and_the_default_one_and_says_so(monkeypatch) -> None:
    monkeypatch.setattr(sweep, "PROFILE_S", -1.0)
    rows = list(sweep.rows(Options()))
    own = [row for row in rows if row.metric.endswith("its own settings")]
    assert own[0].ratio == pytest.approx(5123 / 1283)
    assert [row.value for row in rows if row.metric.endswith("of 16 pairs measured")] == [4, 4]
