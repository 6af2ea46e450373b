"""Words that must not stand in a file; each ban names its replacement."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

# Assembled here, so that this file does not break its own rules.
LEFTOVERS = ("TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK")

BANNED_IMPORTS = {
    "pickle": "msgspec for messages, arrays for bulk data: unpickling runs code",
    "cPickle": "msgspec",
    "marshal": "msgspec: unmarshalling can crash the interpreter",
    "shelve": "a table of our own: shelve is pickle",
    "dill": "msgspec: dill is pickle",
    "cloudpickle": "msgspec: cloudpickle is pickle",
    "pdb": "a debugger at the command line (python -m pdb)",
    "storage": "kvtierd.storage",
    "gpu": "kvtierd.gpu",
    "protocol": "kvtierd.protocol",
    "pkg_resources": "importlib.resources",
}

BANNED_CALLS = {
    "eval": "a parser for what is wanted",
    "exec": "importlib for modules, functions for the rest",
    "breakpoint": "nothing: remove it",
    "os.fork": "subprocess, or multiprocessing with spawn: sockets and threads do not survive a fork",
    "os.forkpty": "subprocess",
    "os.system": "subprocess.run with a list",
    "os._exit": "sys.exit, so that what is open is closed",
    "yaml.load": "yaml.compose or yaml.safe_load: load makes objects",
    "yaml.unsafe_load": "yaml.safe_load",
    "np.load": "np.frombuffer or np.memmap: load may unpickle",
    "numpy.load": "np.frombuffer or np.memmap",
    "time.time": "a Clock (kvtierd.core.clock): wall clocks jump",
}

PRINTING = ("kvtierd/cli/", "kvtierd/bench/")


def _called(node: ast.Call) -> str:
    match node.func:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id=owner), attr=name):
            return f"{owner}.{name}"
        case _:
            return ""


@pytest.fixture(scope="session")
def trees(root: Path, python_files: list[Path]) -> dict[Path, ast.Module]:
    return {path: ast.parse((root / path).read_text()) for path in python_files}


def test_no_leftovers(root: Path, text_files: list[Path]) -> None:
    pattern = re.compile(rf"\b({'|'.join(LEFTOVERS)})\b")
    found = [
        f"{path}:{number}: {match[0]}; do it, or say in the closing note why not"
        for path in text_files
        for number, line in enumerate((root / path).read_text(errors="replace").splitlines(), 1)
        if (match := pattern.search(line))
    ]
    assert not found, "\n".join(found)


def test_case_30_nothing_that_unpickles_and_no_bare_names_are_imported(trees: dict[Path, ast.Module]) -> None:
    found = [
        f"{path}:{node.lineno}: {name}; use {BANNED_IMPORTS[name.split('.')[0]]}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in _imported(node)
        if name.split(".")[0] in BANNED_IMPORTS
    ]
    assert not found, "\n".join(found)


def test_case_30_nothing_evaluates_forks_or_loads_objects(trees: dict[Path, ast.Module]) -> None:
    found = [
        f"{path}:{node.lineno}: {_called(node)}; use {BANNED_CALLS[_called(node)]}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _called(node) in BANNED_CALLS
    ]
    assert not found, "\n".join(found)


def test_processes_are_spawned(trees: dict[Path, ast.Module]) -> None:
    """multiprocessing forks by default: its own Process, Pool and Queue are for a spawn context only."""
    found = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = _called(node)
            if name.endswith(("get_context", "set_start_method")):
                method = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
                if method != "spawn":
                    found.append(f"{path}:{node.lineno}: {name}({method!r}); use get_context('spawn')")
            elif name in {f"multiprocessing.{kind}" for kind in ("Process", "Pool", "Queue", "Pipe", "Manager")}:
                found.append(f"{path}:{node.lineno}: {name}; use multiprocessing.get_context('spawn')")
    assert not found, "\n".join(found)


def test_the_library_does_not_print(trees: dict[Path, ast.Module]) -> None:
    found = [
        f"{path}:{node.lineno}: print; use logging.getLogger(__name__)"
        for path, tree in trees.items()
        if not str(path).startswith((*PRINTING, "tests/"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _called(node) == "print"
    ]
    assert not found, "\n".join(found)


def test_no_path_of_one_machine(root: Path, text_files: list[Path]) -> None:
    """A home folder, a work folder or a registry's address in a file works for one person only."""
    pattern = re.compile(
        r"(/home/\w{2,}|/root/|/Users/\w+|/work/\w+|/opt/\w+/|https?://[\w.-]*(?:pypi|pythonhosted)[\w.]*)"
    )
    found = [
        f"{path}:{number}: {match[0]}; use a path relative to the repository, or an option"
        for path in text_files
        if path.parts[:2] != ("tests", "tidy")
        for number, line in enumerate((root / path).read_text(errors="replace").splitlines(), 1)
        if (match := pattern.search(line))
    ]
    assert not found, "\n".join(found)


def test_no_numba_outside_the_packages_that_compile(trees: dict[Path, ast.Module]) -> None:
    """Kernels live where the cache's hash looks for them (kvtierd.index.jit.SOURCES)."""
    allowed = (
        "kvtierd/index/",
        "kvtierd/policy/",
        "kvtierd/tiers/steps/",
        "gpu/",
        "kvtierd/bench/",
        "kvtierd/stress/",
        "tests/",
    )
    found = [
        f"{path}:{node.lineno}: imports numba; put the kernel into one of {', '.join(allowed[:4])}"
        for path, tree in trees.items()
        if not str(path).startswith(allowed)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(name.split(".")[0] == "numba" for name in _imported(node))
    ]
    assert not found, "\n".join(found)


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Modules that a statement imports; relative imports name none."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if node.module and node.level == 0 else []
