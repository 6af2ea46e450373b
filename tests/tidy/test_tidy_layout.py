"""The shape of the repository: links, file sizes, dead files, links in documents."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

LINKS = ("gpu", "protocol", "storage", "systemd")
MAX_LINES = 350
MAX_COLUMNS = 120
SHIPPED = ("kvtierd.testing.", "kvtierd.connectors.")
"""Packages whose modules others import, not we."""
FOUND_BY_NAME = ("kvtierd.gpu.kernels.", "kvtierd.gpu.host_kernels.", "kvtierd.gpu.reference.")
"""Packages of kernels, which the registry and `kvtierctl precompile` find by themselves, and of their oracles."""


@pytest.mark.parametrize("name", LINKS)
def test_linked_package_is_a_relative_link_to_the_top_level(root: Path, name: str) -> None:
    link = root / "kvtierd" / name
    assert link.is_symlink(), f"kvtierd/{name} must be a link: ln -s ../{name} kvtierd/{name}"
    assert str(link.readlink()) == f"../{name}"


def test_files_are_short(root: Path, python_files: list[Path]) -> None:
    lengths = {path: len((root / path).read_text().splitlines()) for path in python_files}
    long = [f"{path}: {count} lines; it has two jobs, give each a file" for path, count in lengths.items()
            if count > MAX_LINES]  # fmt: skip
    assert not long, "\n".join(long)


def test_lines_are_short(root: Path, text_files: list[Path]) -> None:
    long = [
        f"{path}:{number}: {len(line)} columns; the limit is {MAX_COLUMNS}"
        for path in text_files
        if path.suffix in {".py", ".sh", ".toml", ".yaml"} or path.name in {"Makefile", "run"}
        for number, line in enumerate((root / path).read_text().splitlines(), 1)
        if len(re.sub(r"\s*# (?:noqa|type:|fmt:).*", "", line)) > MAX_COLUMNS  # as ruff counts
    ]
    assert not long, "\n".join(long)


def test_no_file_is_dead(root: Path, library_files: list[Path]) -> None:
    modules = {_module(path): path for path in library_files}
    used = {name for name, path in modules.items() if path.name == "__init__.py"} | _entry_points(root)
    for path in library_files:
        text = (root / path).read_text()
        used |= _imports(text) - {_module(path)}
        used |= set(re.findall(r'"(kvtierd(?:\.\w+)+)"', text))
    catalogue = (root / "kvtierd/bench/catalogue.py").read_text()
    used |= {f"kvtierd.bench.{name}" for name in re.findall(r'^    "(\w+)":', catalogue, re.MULTILINE)}
    shipped = {name for name in modules if name.startswith((*SHIPPED, *FOUND_BY_NAME))}
    dead = sorted(str(modules[name]) for name in set(modules) - used - shipped)
    assert not dead, f"nothing imports {', '.join(dead)}; use it or remove it"


def test_links_in_documents_lead_somewhere(root: Path, text_files: list[Path]) -> None:
    broken = [
        f"{path}: {target}"
        for path in text_files
        if path.suffix == ".md"
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", _prose(root / path))
        if not re.match(r"[a-z]+:", target) and not (root / path.parent / target).exists()
    ]
    assert not broken, "\n".join(broken)


def test_paths_that_documents_name_exist(root: Path) -> None:
    missing = [
        f"{name}: {target}"
        for name in ("README.md", "ARCHITECTURE.md", "docs/DECISIONS.md")
        if (root / name).exists()
        for target in re.findall(r"`((?:kvtierd|gpu|storage|protocol|tests|systemd)/[\w./-]+)`", _prose(root / name))
        if not (root / target).exists() and not (root / "kvtierd" / target).exists()
    ]
    assert not missing, "\n".join(missing)


def test_pins_agree(root: Path) -> None:
    """make run and make test-engines must not bring two builds of torch, or a CUDA one."""
    files = [root / "constraints.txt", *sorted((root / "tests/engines").glob("transformers*requirements.txt"))]
    pins: dict[str, set[str]] = {}
    for line in (line for file in files for line in file.read_text().splitlines() if "==" in line):
        name, _, version = line.partition("==")
        pins.setdefault(name, set()).add(version)
    assert pins["torch"] == {"2.13.0"}
    assert {name: versions for name, versions in pins.items() if len(versions) > 1} == {}


def _prose(path: Path) -> str:
    """A document without its code blocks."""
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    parts = parts if parts[0] == "kvtierd" else ("kvtierd", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(text: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _entry_points(root: Path) -> set[str]:
    project = tomllib.loads((root / "pyproject.toml").read_text())
    return {target.split(":")[0] for target in project["project"]["scripts"].values()}
