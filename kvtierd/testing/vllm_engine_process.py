"""A vLLM engine in a process of its own, driven by lines of JSON: what `vllm_engine.Engine` starts and talks to."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Emit = Callable[[dict[str, Any]], None]


def main() -> None:
    """Answer requests on standard input until it closes. Replies are lines on the descriptor that the first argument
    names: what the engine prints is no reply."""
    replies = os.fdopen(int(sys.argv[1]), "w", buffering=1)

    def emit(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")

    engine = _start(json.loads(sys.stdin.readline()))
    emit({"done": True})
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("do")
        if what == "generate":
            emit({"done": _generate(engine, emit, **request)})
        elif what == "reset":
            emit({"done": engine.reset_prefix_cache(**request)})
        elif what == "metric":
            emit({"done": sum(metric.value for metric in engine.get_metrics() if metric.name == request["name"])})


def _start(options: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    for name, kind in (("kv_transfer_config", KVTransferConfig), ("kv_events_config", KVEventsConfig)):
        if name in options:
            options[name] = kind(**options[name])
    return LLM(**options)


def _generate(
    engine: Any, emit: Emit, prompts: list[list[int]], new_tokens: int, abort_after: int
) -> list[dict[str, Any]]:
    """Greedy answers to prompts of token ids; `abort_after` tokens of the first, all are aborted (0: none is)."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    core = engine.llm_engine
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0)
    started = time.perf_counter()
    names = [f"{time.monotonic_ns()}-{i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        core.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)
    answers: dict[str, dict[str, Any]] = {n: {"tokens": [], "logprobs": [], "at_s": [], "cached": 0} for n in names}
    while core.has_unfinished_requests():
        for output in core.step():
            _take(answers[output.request_id], output, time.perf_counter() - started)
        if count := len(answers[names[0]]["tokens"]):
            emit({"tokens": count})
            if count >= abort_after > 0:
                core.abort_request(names)
    return [answers[name] for name in names]


def _take(answer: dict[str, Any], output: Any, at_s: float) -> None:
    made = output.outputs[0]
    tokens = list(made.token_ids)
    answer["at_s"] += [at_s] * (len(tokens) - len(answer["tokens"]))
    answer["tokens"] = tokens
    answer["logprobs"] = [step[token].logprob for token, step in zip(tokens, made.logprobs, strict=True)]
    answer["cached"] = output.num_cached_tokens or answer["cached"]


if __name__ == "__main__":
    main()
