"""In bfloat16 a loaded prefix gives, bit for bit, what vLLM's own prefix cache gives; and both caches work together."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def reference(start, short, long, text):
    """Without a connector: cold, and from the engine's own prefix cache."""
    with start("plain-bfloat16", dtype="bfloat16", enable_prefix_caching=True) as engine:
        engine.answer(text[-40:], 2)
        return {
            name: (engine.answer(prompt), engine.answer(prompt)) for name, prompt in (("short", short), ("long", long))
        }


def test_a_hit_is_bit_for_bit_that_of_the_engines_own_cache(
    start, daemon, reference, short, long, text, whole, figures
):
    with start("bfloat16", dtype="bfloat16", endpoint=daemon.endpoint, enable_prefix_caching=True) as engine:
        engine.answer(text[-40:], 2)
        for name, prompt in (("short", short), ("long", long)):
            plain_cold, plain_hit = reference[name]
            assert plain_hit.cached == whole(prompt)
            before = daemon.blocks()
            cold = engine.answer(prompt)
            assert (cold.cached, cold.tokens, cold.logprobs) == (0, plain_cold.tokens, plain_cold.logprobs)
            daemon.await_blocks(before + whole(prompt) // 128)
            own = engine.answer(prompt)
            assert (own.cached, own.tokens, own.logprobs) == (whole(prompt), plain_hit.tokens, plain_hit.logprobs)
            assert engine.reset_prefix_cache()
            hit = engine.answer(prompt)
            assert (hit.cached, hit.tokens, hit.logprobs) == (whole(prompt), plain_hit.tokens, plain_hit.logprobs)
            tokens = f"bfloat16, {len(prompt)} tokens: time to first token"
            first, loaded = cold.at_s[0], hit.at_s[0]
            without = plain_cold.at_s[0]
            figures[f"{tokens}, without the connector"] = f"{without:.3f}"
            figures[f"{tokens}, cold"] = f"{first:.3f}   {first / without:.3f} of without"
            figures[f"{tokens}, hit"] = f"{loaded:.3f}   {loaded / first:.3f} of cold"
            figures[f"{tokens}, hit in vLLM's own cache"] = f"{own.at_s[0]:.3f}"
        # The engine has the first half itself, and loads the second behind it.
        assert engine.reset_prefix_cache()
        assert engine.answer(short[:700], 2).cached == 640
        both = engine.answer(short)
        assert (both.cached, both.tokens) == (whole(short), reference["short"][1].tokens)
        # Weights that were changed in place have no name yet: nothing of before is found, and what comes after is.
        assert engine.reset_prefix_cache(reset_connector=True)
        before = daemon.blocks()
        assert engine.answer(short[:700], 2).cached == 0
        daemon.await_blocks(before + 5)
        assert engine.reset_prefix_cache()
        assert engine.answer(short[:700], 2).cached == 640


def test_a_hit_against_vllms_own_example(start, tmp_path, short, long, text, figures):
    """ExampleConnector keeps a file a layer; measured here so that both are of the same run."""
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    with start("example", dtype="bfloat16", connector=connector) as engine:
        engine.answer(text[-40:], 2)
        for prompt in (short, long):
            cold, hit = engine.answer(prompt), engine.answer(prompt)
            assert hit.tokens
            tokens = f"bfloat16, {len(prompt)} tokens: time to first token"
            figures[f"{tokens}, hit of ExampleConnector"] = (
                f"{hit.at_s[0]:.3f}   {hit.at_s[0] / cold.at_s[0]:.3f} of cold"
            )
