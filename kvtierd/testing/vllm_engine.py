"""A real vLLM engine, on the CPU, as a child process: for tests and benches of the connector. vLLM is not imported."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CONNECTOR = {
    "kv_connector": "KvtierdConnector",
    "kv_connector_module_path": "kvtierd.connectors.vllm",
    "kv_role": "kv_both",
}
"""The one line: what a user gives vLLM as --kv-transfer-config."""

BLOCK_TOKENS = 128
"""Tokens of a block of vLLM's KV cache on a CPU, unless it is told otherwise."""

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    # vLLM leaves one core to others, and two where it has a connector; on two cores that makes none at all. The same
    # number of threads everywhere, or neither figures nor bits can be compared.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens, the log-probability of each, when each came (seconds from the request), and how many tokens of
    the prompt were found in a cache."""

    tokens: list[int]
    logprobs: list[float]
    at_s: list[float]
    cached: int

    @property
    def longest_step_s(self) -> float:
        """The longest time between two tokens."""
        return max(b - a for a, b in zip(self.at_s, self.at_s[1:], strict=False))


class EngineError(RuntimeError):
    """The engine ended or was too slow; the text ends with the last lines of its log."""


class Engine:
    """`LLM(model, **options)` in a process of its own, with `environment` added to this one's.

    `connector` is vLLM's kv_transfer_config, None for none; `log` is the file that takes what the engine prints.
    `python` is the interpreter of an environment that has vLLM. A context manager: it starts and ends the process.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        connector: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
        **options: Any,
    ) -> None:
        self._log = log
        self._environment = {**os.environ, **_ENVIRONMENT, **(environment or {})}
        # As for the daemon: this package is used, also where it is not installed.
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [self._environment.get("PYTHONPATH")])]
        self._environment["PYTHONPATH"] = os.pathsep.join(paths)
        self._python = python
        self._options = {
            "model": str(model),
            "enforce_eager": True,
            "max_model_len": 4096,
            "enable_prefix_caching": False,
            **({"kv_transfer_config": dict(connector)} if connector is not None else {}),
            **options,
        }
        self._process: subprocess.Popen[str] | None = None
        self._replies = -1
        self._left = b""

    def __enter__(self) -> Self:
        read, write = os.pipe()
        command = [self._python, "-P", "-m", "kvtierd.testing.vllm_engine_process", str(write)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment,
                pass_fds=(write,),
                text=True,
            )
        os.close(write)
        self._replies = read
        try:
            self._ask(self._options, 240)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the engine; a second call does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(self._replies)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int = 32,
        *,
        abort_after: int = 0,
        on_token: Callable[[int], None] | None = None,
        timeout_s: float = 240.0,
    ) -> list[Answer]:
        """Answers to prompts that come at once. `on_token(n)` is called when the first has n tokens; with `abort_after`
        all are aborted then."""
        request = {
            "do": "generate",
            "prompts": [list(prompt) for prompt in prompts],
            "new_tokens": new_tokens,
            "abort_after": abort_after,
        }
        return [Answer(**answer) for answer in self._ask(request, timeout_s, on_token)]

    def answer(self, prompt: Sequence[int], new_tokens: int = 32, **options: Any) -> Answer:
        """The answer to one prompt."""
        (answer,) = self.generate([prompt], new_tokens, **options)
        return answer

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Empty the engine's own prefix cache."""
        done: bool = self._ask({"do": "reset", "reset_connector": reset_connector}, 60)
        return done

    def metric(self, name: str) -> float:
        """The sum of one of vLLM's counters; it wants an engine made with `disable_log_stats=False`."""
        value: float = self._ask({"do": "metric", "name": name}, 60)
        return value

    def log(self) -> str:
        """All that the engine has printed."""
        return self._log.read_text(errors="replace")

    def _ask(self, request: Mapping[str, Any], timeout_s: float, on_token: Callable[[int], None] | None = None) -> Any:
        assert self._process is not None, "the engine was closed"
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        while True:
            reply = self._line(timeout_s)
            if "done" in reply:
                return reply["done"]
            if on_token is not None:
                on_token(reply["tokens"])

    def _line(self, timeout_s: float) -> dict[str, Any]:
        while b"\n" not in self._left:
            if not select.select([self._replies], [], [], timeout_s)[0]:
                raise EngineError(f"the engine said nothing for {timeout_s} s{self._tail()}")
            data = os.read(self._replies, 1 << 16)
            if not data:
                raise EngineError(f"the engine ended{self._tail()}")
            self._left += data
        line, self._left = self._left.split(b"\n", 1)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _tail(self) -> str:
        return "\n" + "\n".join(self.log().splitlines()[-30:])
