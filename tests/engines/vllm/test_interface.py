"""The connector against vLLM's interface, by signature: of the installed package, and of any whose unpacked folder
$KVTIERD_VLLM_SOURCE names. Read and not imported, so that a build for other hardware can be checked too."""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path

import pytest

from kvtierd.connectors import vllm_scheduler

BASE = Path("distributed", "kv_transfer", "kv_connector", "v1", "base.py")
OURS = Path(vllm_scheduler.__file__).with_name("vllm.py")


def sources() -> list[Path]:
    spec = importlib.util.find_spec("vllm")
    found = [Path(spec.origin).parent] if spec is not None and spec.origin is not None else []
    if "KVTIERD_VLLM_SOURCE" in os.environ:
        found.append(Path(os.environ["KVTIERD_VLLM_SOURCE"]))
    return found


def methods(path: Path, name: str) -> dict[str, ast.FunctionDef]:
    (made,) = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return {node.name: node for node in made.body if isinstance(node, ast.FunctionDef)}


def parameters(method: ast.FunctionDef) -> tuple[list[str], bool]:
    return [argument.arg for argument in method.args.args], method.args.kwarg is not None


def is_abstract(method: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "abstractmethod" for node in method.decorator_list)


@pytest.fixture(params=sources(), ids=str)
def interface(request) -> dict[str, ast.FunctionDef]:
    base = request.param / BASE
    return {**methods(base, "SupportsHMA"), **methods(base, "KVConnectorBase_V1")}


def test_each_method_that_vllm_calls_takes_what_vllm_passes(interface):
    ours = methods(OURS, "KvtierdConnector")
    public = {name for name in ours if not name.startswith("_")}
    assert public <= set(interface), "a method that vLLM does not know is never called"
    wrong = {name for name in public if parameters(ours[name]) != parameters(interface[name])}
    assert not wrong
    assert parameters(ours["__init__"]) == parameters(interface["__init__"])


def test_everything_that_must_be_there_is(interface):
    wanted = {name for name, method in interface.items() if is_abstract(method)}
    assert wanted
    assert wanted <= set(methods(OURS, "KvtierdConnector"))
