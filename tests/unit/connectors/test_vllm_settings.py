"""What may be said in kv_connector_extra_config, and what weights are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtierd.connectors.vllm_settings import Settings, read_settings
from kvtierd.connectors.vllm_weights import commit_of, fingerprint


def test_nothing_is_wanted():
    assert read_settings({}) == Settings()
    assert Settings().lookup_timeout_ms == 50


def test_settings_are_read():
    read = read_settings({"endpoint": "ipc:///x", "lookup_timeout_ms": 20})
    assert (read.endpoint, read.lookup_timeout_ms) == ("ipc:///x", 20)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"endpont": "ipc:///x"}, "did you mean endpoint"),
        ({"zzzz": 1}, "known are endpoint"),
        ({"lookup_timeout_ms": 0}, "lookup_timeout_ms"),
        ({"lookup_timeout_ms": "soon"}, "lookup_timeout_ms"),
        ({"revision": 3}, "revision"),
    ],
)
def test_what_is_wrong_is_named(extra, says):
    with pytest.raises(ValueError, match=says):
        read_settings(extra)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_a_fingerprint_is_of_weights_and_configuration(folder):
    first = fingerprint(folder)
    assert first == fingerprint(folder)
    (folder / "tokenizer.json").write_text("{ }")
    (folder / "README.md").write_text("new")
    assert fingerprint(folder) == first
    (folder / "config.json").write_text("{ }")
    second = fingerprint(folder)
    (folder / "model.safetensors").write_bytes(b"Weights")
    assert len({first, second, fingerprint(folder)}) == 3


def test_a_fingerprint_tells_files_apart(folder):
    """The same bytes cut otherwise, or under other names, are another model."""
    first = fingerprint(folder)
    (folder / "model.safetensors").write_bytes(b"weigh")
    (folder / "model2.safetensors").write_bytes(b"ts")
    assert fingerprint(folder) != first


def test_one_file_has_a_fingerprint(folder):
    assert fingerprint(folder / "model.safetensors").startswith("blake3:")


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no weights"):
        fingerprint(tmp_path)


@pytest.mark.parametrize(
    ("path", "commit"),
    [
        ("/hub/models--a--b/snapshots/0123abcd/config.json", "0123abcd"),
        ("/hub/models--a--b/blobs/0123abcd", None),
        ("/snapshots", None),
    ],
)
def test_a_commit_is_read_from_the_hubs_cache(path, commit):
    assert commit_of(Path(path)) == commit
