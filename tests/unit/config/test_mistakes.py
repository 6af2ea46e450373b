"""Every mistake is reported, with its place, what is wrong and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

MANY = """\
profile: ultra-lon
kv_cache_config:
  blok_size: 128
  block_size: 0
  gpu_watermark: 1.5
  prefetch_window: 3
  prefetch_window: 4
  compression: yes
hots:
  capacity: 3
host:
  chunk_bytes: 3MiB
gpu: {device: cuda, capacity: -5}
nvme:
  directory: rel
  mode: dirct
  capacity: 4.5Gob
  io_threads: !!python/object/apply:os.system [true]
server:
  events: maybe
  runtime_dir:
leases: [1, 2]
"""


@pytest.mark.parametrize("listen", ["127.999.0.1:9464", "127.0.0.1:0", "127.0.0.1:70000"])
def test_address_that_cannot_be_is_found_before_the_start(mistakes, listen: str) -> None:
    assert [problem.key for problem in mistakes(f"metrics: {{listen: '{listen}'}}")] == ["metrics.listen"]


def test_all_mistakes_of_a_file_are_reported_with_their_lines(mistakes, file: Path) -> None:
    found = [(problem.origin, problem.key) for problem in mistakes(MANY)]
    assert found == [
        (f"{file}:{line}", key)
        for line, key in [
            (1, "profile"),
            (3, "kv_cache_config.blok_size"),
            (4, "kv_cache_config.block_size"),
            (5, "kv_cache_config.gpu_watermark"),
            (7, "kv_cache_config.prefetch_window"),
            (8, "kv_cache_config.compression"),
            (9, "hots"),
            (12, "host.chunk_bytes"),
            (13, "gpu.device"),
            (13, "gpu.capacity"),
            (15, "nvme.directory"),
            (16, "nvme.mode"),
            (17, "nvme.capacity"),
            (18, "nvme.io_threads"),
            (20, "server.events"),
            (21, "server.runtime_dir"),
            (22, "leases"),
        ]
    ]


def test_mistakes_of_all_sources_are_reported_at_once(mistakes) -> None:
    found = mistakes(
        "host: {watermark: 2}",
        {"KVTIERD__HOST__CAPASITY": "1GiB", "KVTIERD__LOG__LEVEL": "loud", "HOME": "/root"},
        [("nvme.io_threads", "many", "--set"), ("server.tenant", "../x", "--tenant")],
    )
    assert [(problem.origin.rpartition("/")[2], problem.key) for problem in found] == [
        ("kvtierd.yaml:1", "host.watermark"),
        ("$KVTIERD__HOST__CAPASITY", "host.capasity"),
        ("$KVTIERD__LOG__LEVEL", "log.level"),
        ("--set", "nvme.io_threads"),
        ("--tenant", "server.tenant"),
    ]


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("kv_cache_config.blocksize", "kv_cache_config.block_size"),
        ("kv_cache_config.compression.treshold", "kv_cache_config.compression.threshold"),
        ("kv_cache_config.threshold", "kv_cache_config.compression.threshold"),
        ("block_size", "kv_cache_config.block_size"),
        ("nvme.io_thread", "nvme.io_threads"),
        ("kv_cache.block_size", "kv_cache_config.block_size"),
        ("workers", "worker_threads"),
    ],
)
def test_unknown_key_names_the_nearest(mistakes, key: str, nearest: str) -> None:
    (problem,) = mistakes(options=[(key, "1", "--set")])
    assert problem.text == f"unknown key; the nearest is {nearest}"


@pytest.mark.parametrize(
    ("key", "text", "says"),
    [
        ("kv_cache_config.block_size", "65537", "1..65536"),
        ("kv_cache_config.block_size", "1.5", "a whole number"),
        ("kv_cache_config.block_size", "", "a whole number"),
        ("kv_cache_config.gpu_watermark", "0", "above 0 and up to 1"),
        ("kv_cache_config.gpu_watermark", "nan", "above 0 and up to 1"),
        ("host.watermark", "inf", "above 0 and up to 1"),
        ("host.chunk_bytes", "512MiB", "1MiB..256MiB"),
        ("host.chunk_bytes", "48MiB", "not a power of two; the nearest below is 32MiB"),
        ("host.capacity", "0", "1MiB"),
        ("host.capacity", "9" * 400, "a size like 64MiB"),
        ("nvme.segment_bytes", "4194305", "not a multiple of 4096"),
        ("nvme.mode", "Direct", "did you mean direct?"),
        ("gpu.device", "cuda:x", "like auto or host or cuda:0"),
        ("server.tenant", "a" * 33, "like default or team-a"),
        ("server.runtime_dir", "run", "absolute"),
        ("cache_dir", "a\0b", "zero byte"),
        ("server.events", "2", "neither true nor false"),
    ],
)
def test_value_that_cannot_be_used_says_what_can(mistakes, key: str, text: str, says: str) -> None:
    (problem,) = mistakes(options=[(key, text, "--set")])
    assert problem.key == key
    assert says in problem.text


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("host: {capacity: 32MiB}", "host.capacity", "less than one chunk (host.chunk_bytes is 64"),
        ("host: {capacity: 32MiB, chunk_bytes: 64MiB}", "host.capacity", "less than one chunk"),
        ("nvme: {capacity: 300MiB}", "nvme.capacity", "less than two segments"),
        ("nvme: {require: o_direct, mode: buffered}", "nvme.require", "while nvme.mode is buffered"),
        ("nvme: {require: gds, io: posix}", "nvme.require", "while nvme.io is posix"),
        ("leases: {ttl_ms: 700000}", "leases.ttl_ms", "over leases.max_ttl_ms, 600000"),
        ("leases: {max_ttl_ms: 5}", "leases.max_ttl_ms", "10000 is over leases.max_ttl_ms, 5"),
        (f"server: {{runtime_dir: /{'r' * 90}}}", "server.runtime_dir", "the kernel allows 107"),
        ("server: {runtime_dir: /var/lib/kvtierd/}", "server.runtime_dir", "a folder each"),
    ],
)
def test_contradiction_is_reported_at_an_explicit_value(mistakes, text: str, key: str, says: str) -> None:
    (problem,) = mistakes(text)
    assert (problem.key, problem.origin.endswith(":1")) == (key, True)
    assert says in problem.text


def test_contradiction_of_an_invalid_value_is_not_reported_twice(mistakes) -> None:
    (problem,) = mistakes("host: {capacity: 32MiB, chunk_bytes: 3MiB}")
    assert problem.key == "host.chunk_bytes"


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("host: {capacity", 1, "is not YAML"),
        ("a: 1\nb: [\n", 3, "is not YAML"),
        ("- 1\n- 2\n", 1, "is a section"),
        ("just words", 1, "is a section"),
        ("{1: {2: 3}}: 4", 1, "not a plain word"),
        ("host:\n  capacity: {a: 1}", 2, "takes one value"),
        ("host: &x {capacity: 64MiB}\nhost: *x", 2, "written twice, first in line 1"),
        ("--- {}\n--- {}\n", 2, "is not YAML"),
    ],
)
def test_file_of_the_wrong_form_is_reported_with_its_line(
    mistakes, file: Path, text: str, line: int, says: str
) -> None:
    (problem,) = mistakes(text)
    assert problem.origin == f"{file}:{line}"
    assert says in problem.text


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"host: \x01", b"#" * (1 << 20) + b"##"])
def test_bytes_that_are_no_text_are_reported(mistakes, file: Path, data: bytes) -> None:
    file.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_text", lambda *_: None)
        (problem,) = mistakes("")
    assert problem.origin.startswith(str(file))


def test_file_that_is_not_there_is_reported(mistakes, file: Path) -> None:
    file.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_text", lambda *_: None)
        (problem,) = mistakes("")
    assert "cannot be read: Is a directory" in str(problem)
