"""The real model, once a session, and a daemon of its own; each test has a namespace of its own."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]  # these tests need an environment of their own: make test-engines
else:
    os.environ["HF_HUB_OFFLINE"] = "1"

from kvtierd import Client
from kvtierd.daemon.embedded import EmbeddedDaemon

SETTINGS = {"host__capacity": "256MiB", "gpu__capacity": "256MiB", "nvme__capacity": "1GiB"}


@pytest.fixture(scope="session")
def folder() -> Path:
    from kvtierd.connectors.model_files import model_folder

    return model_folder()


@pytest.fixture(scope="session")
def model(folder: Path) -> Any:
    """SmolLM2-135M-Instruct in float32, so that rounding decides no tie between tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


@pytest.fixture(scope="session")
def text_ids(folder: Path) -> Any:
    """1,000 tokens of a real text, [1, 1000]."""
    from kvtierd.connectors.demo_rig import prompt_ids

    return prompt_ids(folder, 1000)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedDaemon]:
    with EmbeddedDaemon(tmp_path_factory.mktemp("daemon"), **SETTINGS) as running:
        yield running


@pytest.fixture
def client(daemon: EmbeddedDaemon) -> Iterator[Client]:
    with Client(daemon.endpoint) as connected:
        yield connected


_salts = itertools.count()


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name}-{next(_salts)}"


@pytest.fixture
def new_store(client: Client, model: Any, salt: str) -> Callable[..., Any]:
    """Make prefix stores that share a namespace which no other test uses."""
    from kvtierd.connectors.transformers import PrefixStore

    def make(**options: Any) -> Any:
        return PrefixStore(options.pop("client", client), options.pop("model", model), tenant_salt=salt, **options)

    return make
