"""The real model, once a session, and a daemon of its own; each test has a namespace of its own."""

from __future__ import annotations

import importlib.util
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]  # these tests need an environment of their own: make test-engines
else:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

from kvtierd import Client, Unavailable
from kvtierd.daemon.embedded import EmbeddedDaemon

HOST_BYTES = 256 << 20
SETTINGS = {"host__capacity": HOST_BYTES, "gpu__capacity": "256MiB", "nvme__capacity": "1GiB"}


@pytest.fixture(scope="session")
def folder() -> Path:
    from kvtierd.connectors.model_files import model_folder

    return model_folder()


@pytest.fixture(scope="session")
def model(folder: Path) -> Any:
    """SmolLM2-135M-Instruct in float32, so that rounding decides no tie between tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # two threads that wait for each other crawl where other work takes the cores
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


@pytest.fixture(scope="session")
def text_ids(folder: Path) -> Any:
    """1,000 tokens of a real text, [1, 1000]."""
    from kvtierd.connectors.demo_rig import prompt_ids

    return prompt_ids(folder, 1000)


def _await_arena(daemon: EmbeddedDaemon) -> None:
    with Client(daemon.endpoint, timeout_s=20) as probe:
        give_up_s = time.monotonic() + 90
        while probe.stats()["host_ready_bytes"] < HOST_BYTES:
            assert time.monotonic() < give_up_s, "the arena was not made in 90 s"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedDaemon]:
    with EmbeddedDaemon(tmp_path_factory.mktemp("daemon"), **SETTINGS) as running:
        _await_arena(running)
        yield running


@pytest.fixture
def await_daemon(daemon: EmbeddedDaemon, client: Client) -> Callable[[], None]:
    """Wait until a daemon that was started anew can serve, and the client has found it again.

    It makes its arena after it is ready; until then reads and stores are refused as busy.
    """

    def wait() -> None:
        _await_arena(daemon)
        give_up_s = time.monotonic() + 90
        while True:
            try:
                client.ping()
            except Unavailable:
                assert time.monotonic() < give_up_s, "the client did not come back in 90 s"
                time.sleep(0.02)
            else:
                return

    return wait


@pytest.fixture
def client(daemon: EmbeddedDaemon) -> Iterator[Client]:
    # Loaded machines are slow and these tests are about answers, so deadlines are generous.
    with Client(daemon.endpoint, timeout_s=20, transfer_timeout_s=20) as connected:
        yield connected


_salts = itertools.count()


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name}-{next(_salts)}"


@pytest.fixture(scope="session")
def plain(model: Any) -> Callable[..., Any]:
    """What model.generate alone answers, greedy: the reference, computed once for each prompt."""
    answers: dict[tuple[bytes, str], Any] = {}

    def generate(input_ids: Any, **options: Any) -> Any:
        key = (input_ids.numpy().tobytes(), repr(options))
        if key not in answers:
            answers[key] = model.generate(input_ids, **options)
        return answers[key]

    return generate


@pytest.fixture
def new_store(client: Client, model: Any, salt: str) -> Callable[..., Any]:
    """Make prefix stores that share a namespace which no other test uses."""
    from kvtierd.connectors.transformers import PrefixStore

    def make(**options: Any) -> Any:
        options = {"client": client, "model": model, "block_size": 32, **options}
        return PrefixStore(options.pop("client"), options.pop("model"), tenant_salt=salt, **options)

    return make


@pytest.fixture(scope="session")
def offloaded_model(model: Any) -> Any:
    """The same weights, with attention that can ask the daemon."""
    import copy

    from kvtierd.connectors.transformers import register_offloaded_attention

    register_offloaded_attention()
    twin = copy.deepcopy(model, {id(weights): weights for weights in model.parameters()})
    twin.set_attn_implementation("kvtierd")
    return twin


@pytest.fixture
def new_cache(client: Client, offloaded_model: Any) -> Iterator[Callable[..., Any]]:
    """Make caches whose past goes to the daemon early, and let go of them."""
    from kvtierd.connectors.transformers import OffloadedCache

    made: list[OffloadedCache] = []

    def make(**options: Any) -> OffloadedCache:
        options = {"client": client, "block_size": 32, "tail_tokens": 64, "timeout_s": 120, **options}
        made.append(OffloadedCache(options.pop("client"), options.pop("model", offloaded_model), **options))
        return made[-1]

    yield make
    for cache in made:
        cache.close()
