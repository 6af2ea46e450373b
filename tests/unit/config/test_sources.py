"""Which source wins, and that every value knows where it came from."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kvtierd.config.fields import FIELDS
from kvtierd.config.loader import ConfigError, build, load
from kvtierd.config.profiles import PROFILES
from kvtierd.config.render import render
from kvtierd.config.schema import Settings
from kvtierd.core.units import GIB, MIB


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    folder = tmp_path / "etc"
    (folder / "conf.d").mkdir(parents=True)
    return folder


def test_nothing_written_gives_the_defaults(load_text) -> None:
    loaded = load_text()
    assert loaded.settings == Settings()
    assert set(loaded.origins.values()) == {"default"}


def test_later_sources_win_and_origins_tell(etc: Path, file: Path) -> None:
    (etc / "kvtierd.yaml").write_text("host:\n  capacity: 1GiB\n  watermark: 0.5\nworker_threads: 1\n")
    (etc / "conf.d" / "20-b.yaml").write_text("host: {capacity: 3GiB}\n")
    (etc / "conf.d" / "10-a.yaml").write_text("host: {capacity: 2GiB}\nnvme: {io_threads: 2}\n")
    (etc / "conf.d" / "notes.txt").write_text("not: read\n")
    environment = {"KVTIERD__NVME__IO_THREADS": "3", "KVTIERD__LEASES__TTL_MS": "7"}
    options = [("leases.ttl_ms", "8", "--set"), ("leases.ttl_ms", "9", "--set")]
    loaded = load(environment=environment, options=options, etc=etc)
    settings = loaded.settings
    assert (settings.host.capacity, settings.host.watermark, settings.worker_threads) == (3 * GIB, 0.5, 1)
    assert (settings.nvme.io_threads, settings.leases.ttl_ms) == (3, 9)
    assert loaded.origins["host.capacity"] == f"{etc}/conf.d/20-b.yaml:1"
    assert loaded.origins["host.watermark"] == f"{etc}/kvtierd.yaml:3"
    assert loaded.origins["nvme.io_threads"] == "$KVTIERD__NVME__IO_THREADS"
    assert loaded.origins["leases.ttl_ms"] == "--set"
    assert loaded.origins["gpu.capacity"] == "default"

    file.write_text("host: {watermark: 0.7}\n")
    alone = load(config=file, environment={}, etc=etc).settings
    assert (alone.host.capacity, alone.host.watermark) == (GIB, 0.7)


@pytest.mark.parametrize(
    ("profile", "key", "value"),
    [
        ("ultra-long", "kv_cache_config.block_size", 512),
        ("high-concurrency", "kv_cache_config.block_size", 64),
        ("bandwidth-limited", "kv_cache_config.compression.threshold", 100),
        ("compute-rich", "kv_cache_config.prefetch_window", 5),
    ],
)
def test_profile_is_a_base_under_explicit_values(load_text, profile: str, key: str, value: int) -> None:
    loaded = load_text(f"profile: {profile}")
    assert _get(loaded.settings, key) == value
    assert loaded.origins[key].startswith(f"profile {profile}, ")
    section, leaf = key.rsplit(".", 1)
    explicit = load_text(f"profile: {profile}", {f"KVTIERD__{section.replace('.', '__')}__{leaf}".upper(): "7"})
    assert _get(explicit.settings, key) == 7


def test_profile_may_come_from_any_source(load_text) -> None:
    assert load_text(environment={"KVTIERD__PROFILE": "ultra-long"}).settings.kv_cache_config.block_size == 512
    assert load_text("profile: ultra-long", options=[("profile", "", "--set")]).settings == Settings()


@pytest.mark.parametrize("profile", PROFILES)
def test_values_of_profiles_are_valid(load_text, profile: str) -> None:
    assert load_text(f"profile: {profile}").settings != Settings()


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MiB", 64 * MIB), ("67108864", 64 * MIB), ("64M", 64 * MIB), ("0.0625GiB", 64 * MIB), ('"64 MiB"', 64 * MIB)],
)
def test_sizes_may_be_written_with_units(load_text, text: str, size: int) -> None:
    assert load_text(f"host: {{chunk_bytes: {text}}}").settings.host.chunk_bytes == size


@pytest.mark.parametrize(("text", "value"), [("on", True), ("no", False), ("True", True), ("'false'", False)])
def test_booleans_may_be_written_as_yaml_has_them(load_text, text: str, value: bool) -> None:
    assert load_text(f"server: {{events: {text}}}").settings.server.events is value


def test_empty_text_switches_the_nvme_tier_off(load_text) -> None:
    assert load_text('nvme: {directory: ""}').settings.nvme.directory == ""
    assert load_text(options=[("nvme.directory", "", "--data-dir")]).settings.nvme.directory == ""


@pytest.mark.parametrize("text", ["", "# nothing\n", "host:\n", "null\n"])
def test_empty_files_and_sections_change_nothing(load_text, text: str) -> None:
    assert load_text(text).settings == Settings()


def test_aliases_of_aliases_cost_nothing(load_text) -> None:
    bomb = "a: &a [x, x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(24)
    )
    with pytest.raises(ConfigError) as caught:
        load_text(bomb)
    assert len(caught.value.problems) == 25


def test_printed_configuration_loads_to_the_same_settings(load_text, file: Path) -> None:
    written = "profile: ultra-long\nserver: {tenant: t-1, events: no}\nnvme: {directory: '/a b #c', capacity: 0}\n"
    loaded = load_text(written)
    printed = render(loaded)
    assert load_text(printed).settings == loaded.settings
    assert f"tenant: t-1 # {file}:2" in " ".join(printed.split())
    assert f"block_size: 512 # profile ultra-long, {file}:1" in " ".join(printed.split())
    lines = [line for line in printed.splitlines() if "#" in line]
    assert len(lines) == len(FIELDS)


def test_every_field_has_a_default_that_it_accepts() -> None:
    for field in FIELDS.values():
        if field.kind is not bool:
            assert field.parse(str(field.default)) == field.default, field.key


def test_build_covers_nested_sections() -> None:
    built = build({"kv_cache_config.compression.threshold": 3, "worker_threads": 2})
    assert (built.kv_cache_config.compression.threshold, built.worker_threads) == (3, 2)


def test_schema_and_yaml_example_of_the_design_agree(load_text) -> None:
    text = """\
kv_cache_config:
  block_size: 128        # tokens a block
  gpu_watermark: 0.8     # share of the gpu tier in use above which blocks move down
  prefetch_window: 3     # blocks fetched ahead
  compression:
    enabled: true
    method: fp8
    threshold: 10        # heat below which a block is compressed, in namespaces that allow loss
"""
    assert load_text(text).settings == Settings()
    assert yaml.safe_load(text)["kv_cache_config"]["compression"]["method"] == "fp8"


def _get(settings: object, key: str) -> object:
    for name in key.split("."):
        settings = getattr(settings, name)
    return settings
