"""`kvtierctl bench vllm`: what the connector does to a real engine, against the engine alone and vLLM's own connector.

What is compared: vLLM's CPU build and a small real model, prompts of 1,500 tokens that nobody has seen, times to the
first token as the engine's caller sees them, medians. Three engines take turns, prompt by prompt and hit by hit, so
that whatever else the machine does meets all of them: without a connector, with vLLM's ExampleConnector (which keeps KV
in files), and with ours. The others are gone when steps are measured. Steps are between tokens of one answer; at the
tenth the daemon is frozen, and then killed, and the longest step of that answer is compared with the longest of others.
An engine uses all CPUs here, so what the kernel does to free a killed daemon's memory comes out of its steps.

It wants vLLM in an environment of its own, whose interpreter $KVTIERD_VLLM_PYTHON names, and the extra `demo` here (a
small model), or a folder of weights at $KVTIERD_VLLM_MODEL.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvtierd.bench.options import Options, need_memory
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.bench.workload import TIMEOUT_S, await_memory
from kvtierd.core.units import GIB
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.protocol.client import Client
from kvtierd.testing.vllm_engine import BLOCK_TOKENS, CONNECTOR, Answer, Engine, EngineError
from kvtierd.testing.waiting import wait_for

PYTHON, MODEL = "KVTIERD_VLLM_PYTHON", "KVTIERD_VLLM_MODEL"
PROMPT_TOKENS = 1500
_STEPS = 32
_HITS = 6
"""Of each prompt: what is compared differs by a few milliseconds of 200."""
_VOCABULARY = range(1000, 40_000)
_BLOCKS = (PROMPT_TOKENS - 1) // BLOCK_TOKENS
_HOST_BYTES = GIB


@dataclasses.dataclass(slots=True)
class _Firsts:
    """Seconds to the first token of prompts that are new, and of the same ones when they are found."""

    cold: list[float] = dataclasses.field(default_factory=list)
    hit: list[float] = dataclasses.field(default_factory=list)


_Turn = tuple[Engine, _Firsts]


def rows(options: Options) -> Iterator[Row]:
    """Three engines in turn."""
    python, model = find_python(), find_model()
    need_memory(9 * GIB)
    count = options.rounds(7, 3)
    with tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=options.directory) as folder:
        try:
            yield from _Bench(python, model, Path(folder), count).rows()
        except EngineError as error:
            raise BenchError(f"the engine failed: {error}") from error


def find_python() -> str:
    """The interpreter of vLLM's environment. Raises BenchError where none is named."""
    named = os.environ.get(PYTHON, "")
    if shutil.which(named) is None:
        where = f"${PYTHON} names {named}, which is no program" if named else f"${PYTHON} is not set"
        raise BenchError(f"NOT AVAILABLE: {where}; it names the python of an environment with vLLM (make engines-env)")
    return named


def find_model() -> Path:
    """A folder of weights. Raises BenchError where there is none."""
    if named := os.environ.get(MODEL):
        return Path(named)
    try:
        from kvtierd.connectors.model_files import model_folder  # wants the extra `demo`
    except ImportError as error:
        raise BenchError(f"NOT AVAILABLE: ${MODEL} is not set, and the extra `demo` is not installed") from error
    return model_folder()


class _Bench:
    def __init__(self, python: str, model: Path, folder: Path, count: int) -> None:
        self._python, self._model, self._folder, self._count = python, model, folder, count
        self._random = random.Random(0)

    def _prompt(self) -> list[int]:
        return self._random.choices(_VOCABULARY, k=PROMPT_TOKENS)

    def _engine(self, connector: dict[str, Any] | None, environment: dict[str, str] | None = None) -> Engine:
        log = self._folder / f"engine-{time.monotonic_ns()}.log"
        return Engine(
            self._model, log, connector=connector, environment=environment, python=self._python, dtype="bfloat16"
        )

    def rows(self) -> Iterator[Row]:
        """The engine with our connector, and what is compared with it."""
        settings = {"host__capacity": _HOST_BYTES, "gpu__capacity": 0, "nvme__capacity": 2 * _HOST_BYTES}
        with (
            EmbeddedDaemon(self._folder / "d", **settings) as daemon,
            Client(daemon.endpoint, timeout_s=TIMEOUT_S) as client,
        ):
            await_memory(client)
            with self._engine(dict(CONNECTOR), {"KVTIERD_ENDPOINT": daemon.endpoint}) as engine:
                yield from self._firsts(engine, client)
                yield from self._away(engine, daemon)

    def _firsts(self, engine: Engine, client: Client) -> Iterator[Row]:
        alone, theirs, ours = _Firsts(), _Firsts(), _Firsts()
        files = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(self._folder / "files")},
        }
        with self._engine(None) as without, self._engine(files) as other:
            # The first prompt of an engine, and its first hit, are slower than others: a round that does not count.
            for number in range(self._count + 1):
                if number == 1:
                    alone, theirs, ours = _Firsts(), _Firsts(), _Firsts()
                everybody = [(without, alone), (other, theirs), (engine, ours)]
                prompts = {id(times): self._cold(each, times) for each, times in _turned(number, everybody)}
                _await_stored(client, number + 1)
                for again in range(_HITS):
                    for each, times in _turned(number + again, everybody[1:]):
                        self._hit(each, times, prompts[id(times)])
        yield _ratio("first token of a hit", ours.hit, ours.cold, "cold, the same engine", "<= 0.25")
        yield _ratio("first token of a hit", ours.hit, theirs.hit, "vLLM's ExampleConnector", "<= 1.0")
        yield _ratio("first token, cold", ours.cold, alone.cold, "without a connector", "<= 1.05")

    def _cold(self, engine: Engine, times: _Firsts) -> list[int]:
        """A prompt that nobody has seen."""
        prompt = self._prompt()
        times.cold.append(engine.answer(prompt, 4).at_s[0])
        return prompt

    def _hit(self, engine: Engine, times: _Firsts, prompt: list[int]) -> None:
        """The same again."""
        again = engine.answer(prompt, 4)
        if again.cached < _BLOCKS * BLOCK_TOKENS:
            raise BenchError(f"only {again.cached} tokens of {PROMPT_TOKENS} were found the second time")
        times.hit.append(again.at_s[0])

    def _away(self, engine: Engine, daemon: EmbeddedDaemon) -> Iterator[Row]:
        usual = [self._steps(engine, None) for _ in range(self._count)]
        longest_ms = statistics.median(answer.longest_step_s for answer in usual) * 1e3
        yield make_row("vllm", "longest step of an answer", longest_ms, "ms")
        frozen = self._steps(engine, lambda: os.kill(daemon.pid, signal.SIGSTOP))
        os.kill(daemon.pid, signal.SIGCONT)
        killed = self._steps(engine, daemon.kill)
        daemon.start()  # so that the block that stops it finds one
        for name, answer in (("frozen", frozen), ("killed", killed)):
            extra_ms = answer.longest_step_s * 1e3 - longest_ms
            yield make_row("vllm", f"delay of a step, daemon {name}", extra_ms, "ms", goal="<= 50")

    def _steps(self, engine: Engine, at_tenth: Callable[[], object] | None) -> Answer:
        def on_token(tokens: int) -> None:
            if tokens == 10 and at_tenth is not None:
                at_tenth()

        return engine.answer(self._prompt(), _STEPS, on_token=on_token)


def _await_stored(client: Client, prompts: int) -> None:
    wait_for(lambda: client.stats()["committed_blocks"] >= prompts * _BLOCKS, TIMEOUT_S)


def _turned(number: int, engines: list[_Turn]) -> list[_Turn]:
    """Every other time the other way round."""
    return engines if number % 2 else engines[::-1]


def _ratio(metric: str, ours: list[float], reference: list[float], name: str, goal: str) -> Row:
    value, other = statistics.median(ours), statistics.median(reference)
    return make_row("vllm", metric, value, "s", reference=other, reference_name=name, goal=goal)
