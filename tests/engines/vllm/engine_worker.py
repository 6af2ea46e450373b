"""A vLLM engine in a process of its own, driven by lines of JSON: what `engine.py` starts and talks to.

It is a process, so that an engine can be started under any environment, frozen with its daemon, and ended for certain.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Answer requests on standard input until it closes; replies go to the descriptor given as the first argument."""
    replies = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    options = json.loads(sys.stdin.readline())
    from vllm import LLM

    transfer = options.pop("kv_transfer_config", None)
    if transfer is not None:
        from vllm.config import KVTransferConfig

        options["kv_transfer_config"] = KVTransferConfig(**transfer)
    started = time.perf_counter()
    engine = LLM(**options)
    replies.write(json.dumps({"ready_s": time.perf_counter() - started}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        replies.write(json.dumps(generate(engine, **request)) + "\n")


def generate(
    engine: Any, prompts: list[list[int]], new_tokens: int, abort_after: int | None = None, logprobs: int | None = None
) -> list[dict[str, Any]]:
    """Greedy answers to prompts of token ids, with when each token came, in seconds from the start.

    With `abort_after` every request is aborted once the first has so many tokens.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    core = engine.llm_engine
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, logprobs=logprobs)
    started = time.perf_counter()
    names = [f"{started}-{i}" for i in range(len(prompts))]
    inner = [
        core.add_request(n, TokensPrompt(prompt_token_ids=p), sampling) for n, p in zip(names, prompts, strict=True)
    ]
    answers: dict[str, dict[str, Any]] = {name: {"tokens": [], "at_s": [], "cached": 0} for name in names}
    while core.has_unfinished_requests():
        for output in core.step():
            _take(answers[output.request_id], output, time.perf_counter() - started)
        if abort_after is not None and len(answers[names[0]]["tokens"]) >= abort_after:
            core.abort_request([name for name in inner if name] or names, internal=bool(inner[0]))
            break
    return [answers[name] for name in names]


def _take(answer: dict[str, Any], output: Any, at_s: float) -> None:
    tokens = list(output.outputs[0].token_ids)
    answer["at_s"] += [at_s] * (len(tokens) - len(answer["tokens"]))
    answer["tokens"] = tokens
    answer["cached"] = output.num_cached_tokens or answer["cached"]
    if output.outputs[0].logprobs is not None:
        steps = zip(tokens, output.outputs[0].logprobs, strict=True)
        answer["logprobs"] = [values[token].logprob for token, values in steps]


if __name__ == "__main__":
    main()
