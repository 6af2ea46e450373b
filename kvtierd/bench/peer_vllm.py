"""vLLM on this host's CPUs, in an environment of its own: prompts that come again, by its connector and by ours.

Both engines are the same but for the connector. A prompt is answered cold and, when it has been saved, once more; the
greedy tokens of both answers must be equal. vLLM's ExampleConnector writes a file for each layer and finds whole
prompts only; it verifies nothing.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvtierd.bench.peer_environments import interpreter
from kvtierd.bench.rows import BenchError
from kvtierd.testing.vllm_engine import CONNECTOR, Engine

PROMPT_TOKENS, NEW_TOKENS = 1501, 4
SAVED_S = 2.0
"""After the cold answers: saving goes on beside the engine's steps."""
MODEL = "KVTIERD_TEST_MODEL"
_VOCABULARY = 40_000


def example_connector(folder: Path) -> dict[str, Any]:
    """vLLM's own connector for files below a folder."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def our_connector(endpoint: str) -> dict[str, Any]:
    """Ours, patient enough for a busy machine."""
    return {**CONNECTOR, "kv_connector_extra_config": {"endpoint": endpoint, "lookup_timeout_ms": 1000}}


def model() -> Path:
    """The small model's folder: $KVTIERD_TEST_MODEL, or made in the environment of the transformers client."""
    if MODEL in os.environ:
        return Path(os.environ[MODEL])
    python = interpreter("transformers")
    if python is None:
        raise BenchError(f"no model: set ${MODEL}, or run `make engines-env`")
    code = "from kvtierd.connectors.model_files import model_folder; print(model_folder())"
    made = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if made.returncode:
        raise BenchError(f"no model: {made.stderr.strip().splitlines()[-1:]}")
    return Path(made.stdout.splitlines()[-1])


def first_token_s(python: Path, log: Path, connector: Mapping[str, Any], prompts: int) -> tuple[float, float]:
    """Median seconds to the first token of prompts of 1,501 tokens: cold, and when they come again."""
    rng = np.random.default_rng(1)
    asked: list[list[int]] = [rng.integers(100, _VOCABULARY, PROMPT_TOKENS).tolist() for _ in range(prompts + 1)]
    with Engine(model(), log, connector=connector, python=str(python)) as engine:
        engine.answer(asked.pop(), NEW_TOKENS)  # what a first request compiles and allocates
        cold = [engine.answer(prompt, NEW_TOKENS) for prompt in asked]
        time.sleep(SAVED_S)
        warm = [engine.answer(prompt, NEW_TOKENS) for prompt in asked]
    for before, after in zip(cold, warm, strict=True):
        if before.tokens != after.tokens:
            raise BenchError(f"{connector['kv_connector']}: {after.tokens} instead of {before.tokens}")
        if not after.cached:
            raise BenchError(f"{connector['kv_connector']}: a prompt that came again was not found")
    return statistics.median(answer.at_s[0] for answer in cold), statistics.median(answer.at_s[0] for answer in warm)
