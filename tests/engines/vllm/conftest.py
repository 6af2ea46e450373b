"""The real engine in processes of its own, the real model, and a daemon from its own environment.

Figures are printed at the end and decide nothing: how long an engine takes is up to whoever else uses the machine.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.ready_daemon import ReadyDaemon
from kvtierd.testing.vllm_engine import CONNECTOR, Answer, Engine

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]  # these tests need an environment of their own: make test-engines

ROOT = Path(__file__).parents[3]
HOST_BYTES = 1 << 30
SETTINGS = {"host__capacity": HOST_BYTES, "gpu__capacity": "64MiB", "nvme__capacity": "2GiB"}

# Tests are about answers, so the deadline is generous; by default it is 50 ms.
PATIENT = {**CONNECTOR, "kv_connector_extra_config": {"lookup_timeout_ms": 5000}}

FIGURES: dict[str, str] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engines)
            item.add_marker(pytest.mark.timeout(900))  # an engine takes half a minute to start, a long prefill too


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if FIGURES:
        terminalreporter.section("vLLM, seconds")
        for name, value in FIGURES.items():
            terminalreporter.write_line(f"{name:60s} {value}")


@pytest.fixture(scope="session")
def figures() -> dict[str, str]:
    return FIGURES


@pytest.fixture(scope="session")
def folder() -> Path:
    """SmolLM2-135M-Instruct, made in the environment of the transformers client, which has what that takes."""
    if "KVTIERD_TEST_MODEL" in os.environ:
        return Path(os.environ["KVTIERD_TEST_MODEL"])
    code = "from kvtierd.connectors.model_files import model_folder; print(model_folder())"
    python = ROOT / ".venv-engines-transformers" / "bin" / "python"
    return Path(subprocess.check_output([python, "-c", code], text=True, cwd=ROOT).splitlines()[-1])


@pytest.fixture(scope="session")
def text(folder: Path) -> list[int]:
    """4,000 tokens of a real text."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    words = "\n\n".join(topics[name] for name in sorted(topics))[:40_000]
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(words).ids[:4000]


@pytest.fixture(scope="session")
def short(text: list[int]) -> list[int]:
    return text[:1500]


@pytest.fixture(scope="session")
def long(text: list[int]) -> list[int]:
    """Not a continuation of the short one."""
    return text[300:3800]


@pytest.fixture(scope="session")
def make_daemon(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ReadyDaemon]:
    def make(name: str) -> ReadyDaemon:
        return ReadyDaemon(tmp_path_factory.mktemp(name), **SETTINGS)

    return make


@pytest.fixture(scope="module")
def daemon(make_daemon: Callable[[str], ReadyDaemon]) -> Iterator[ReadyDaemon]:
    with make_daemon("daemon") as running:
        yield running


@pytest.fixture(scope="session")
def start(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    """Make an engine: `with start("name", dtype="float32", endpoint=daemon.endpoint) as engine`."""
    logs = tmp_path_factory.mktemp("engines")

    def make(name: str, *, endpoint: str | None = None, model: Path = folder, **options: Any) -> Engine:
        if endpoint is not None:
            options.setdefault("connector", PATIENT)
            options["environment"] = {"KVTIERD_ENDPOINT": endpoint, **options.get("environment", {})}
        return Engine(model, logs / f"{name}-{time.monotonic_ns()}.log", **options)

    return make


@pytest.fixture(scope="session")
def plain_float32(
    start: Callable[..., Engine], short: list[int], long: list[int], text: list[int]
) -> dict[str, Answer]:
    """What the engine answers without a connector, in float32."""
    with start("plain-float32", dtype="float32") as engine:
        engine.answer(text[-40:], 2)
        answers = {"short": engine.answer(short), "long": engine.answer(long), "piece": engine.answer(text[2000:2300])}
        growing = [text[at : at + 250] for at in (0, 400, 800)]
        answers |= {f"growing{i}": engine.answer(prompt, 150) for i, prompt in enumerate(growing)}
    return answers


def whole_blocks(prompt: list[int]) -> int:
    """Tokens of the whole blocks of a prompt, at least one token being left to compute."""
    return (len(prompt) - 1) // 128 * 128


@pytest.fixture(scope="session")
def whole() -> Callable[[list[int]], int]:
    return whole_blocks


def assert_same(answer: Answer, expected: Answer) -> None:
    """Tokens are equal, and log-probabilities as near as two orders of summation are in float32."""
    assert answer.tokens == expected.tokens
    assert max(abs(a - b) for a, b in zip(answer.logprobs, expected.logprobs, strict=True)) < 1e-3


@pytest.fixture(scope="session")
def same() -> Callable[[Answer, Answer], None]:
    return assert_same
