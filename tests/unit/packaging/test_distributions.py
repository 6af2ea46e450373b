"""What is shipped is whole, real files, and works elsewhere with the client's few dependencies."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

Built = Any
"""The fixture's value (conftest.py): `sdist`, `wheel`, `wheel_of_sdist`."""

ROOT = Path(__file__).resolve().parents[3]
LINKED = ("gpu", "protocol", "storage", "systemd")
HEAVY = ("torch", "numba", "llvmlite", "kvikio", "yaml", "aiofiles", "transformers")


@pytest.fixture(scope="session")
def client_python(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the wheel and what it declares as dependencies, and nothing else.

    The dependencies are links to those of the running environment: the same files, without a network.
    """
    folder = tmp_path_factory.mktemp("client")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for requirement in _requirements(built.wheel):
        _link(requirement, site)
    command = [sys.executable, "-m", "pip", "--python", str(folder), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*command, str(built.wheel)], check=True)
    return folder / "bin" / "python"


def test_wheel_holds_every_module_as_a_real_file(built: Built) -> None:
    packages = {path.name for path in (ROOT / "kvtierd").iterdir() if path.is_dir()} - set(LINKED)
    folders = [ROOT / name for name in LINKED] + [ROOT / "kvtierd" / name for name in packages]
    sources = {f"kvtierd/{path.relative_to(top.parent)}" for top in folders for path in top.rglob("*.py")}
    assert len(sources) > 50
    with zipfile.ZipFile(built.wheel) as archive:
        infos = archive.infolist()
    assert sources <= {info.filename for info in infos}
    assert not [info.filename for info in infos if (info.external_attr >> 16) & 0o170000 == 0o120000]


@pytest.mark.parametrize(
    "name",
    [
        "py.typed",
        "storage/FORMAT.md",
        "protocol/SPEC.md",
        "protocol/golden.json",
        "daemon/live.html",
        *(f"systemd/{path.name}" for path in sorted((ROOT / "systemd").iterdir()) if path.is_file()),
    ],
)
def test_wheel_holds_every_file_that_is_read_from_it(built: Built, name: str) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        assert archive.read(f"kvtierd/{name}") == (ROOT / "kvtierd" / name).read_bytes()


def test_wheel_brings_no_top_level_package_but_ours(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvtierd"}


def test_sdist_holds_real_files_in_place_of_the_links(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        entries = {entry.name.split("/", 1)[-1]: entry for entry in archive.getmembers()}
    assert not [name for name, entry in entries.items() if entry.issym() or entry.islnk()]
    for name in LINKED:
        assert entries[f"kvtierd/{name}/__init__.py"].isfile()


def test_sdist_builds_to_the_same_wheel(built: Built) -> None:
    first, second = _members(built.wheel), _members(built.wheel_of_sdist)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_client_imports_elsewhere_and_stays_light(client_python: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from kvtierd import Client; import kvtierd;"
        f"print([name for name in {HEAVY!r} if name in sys.modules]); print(kvtierd.__file__)"
    )
    loaded, where = _run(client_python, tmp_path, "-c", code).splitlines()
    assert loaded == "[]"
    assert Path(where).is_relative_to(client_python.parents[1])


def test_commands_work_with_the_clients_dependencies_alone(client_python: Path, tmp_path: Path) -> None:
    assert "ping" in _run(client_python.parent / "kvtierctl", tmp_path, "--help")
    assert _run(client_python.parent / "kvtierctl", tmp_path, "--version").startswith("kvtierctl ")


def test_daemon_without_its_extra_says_what_to_install(client_python: Path, tmp_path: Path) -> None:
    command = [client_python.parent / "kvtierd", "--check-config"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env={})
    assert done.returncode == 69
    assert done.stderr == "kvtierd: yaml is not installed; the daemon needs: pip install 'kvtierd[daemon]'\n"


def test_metadata_names_the_versions_of_python(built: Built) -> None:
    assert "Requires-Python: <3.14,>=3.11" in _metadata(built.wheel)
    assert "License-Expression: Apache-2.0" in _metadata(built.wheel)


def _run(program: Path, folder: Path, *arguments: str) -> str:
    done = subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True, check=False, env={})
    assert done.returncode == 0, done.stderr
    return done.stdout


def _members(wheel: Path) -> dict[str, bytes]:
    """A wheel's files; the list of hashes is left out."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def _metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def _requirements(wheel: Path) -> list[str]:
    """Names that the wheel requires without any extra."""
    lines = [line for line in _metadata(wheel).splitlines() if line.startswith("Requires-Dist: ")]
    return [re.split(r"[ <>=;]", line)[1] for line in lines if "extra ==" not in line]


def _link(requirement: str, site: Path) -> None:
    files = importlib.metadata.distribution(requirement).files or []
    for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
        source = Path(str(importlib.metadata.distribution(requirement).locate_file(top)))
        (site / top).symlink_to(source)
