"""Engines that differ in what shapes KV never share a block; and an engine whose daemon is elsewhere, or short of
memory, answers as one without."""

from __future__ import annotations

import shutil

import pytest


@pytest.fixture(scope="module")
def other_model(folder, tmp_path_factory):
    """The same weights but for one layer, under the same name: what a fine-tune looks like."""
    from safetensors.torch import load_file, save_file

    target = tmp_path_factory.mktemp("tuned") / folder.name
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"] *= 1.25
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_case_07_two_models_on_one_daemon_never_mix(start, daemon, other_model, plain_float32, text, whole, same):
    prompt = text[2000:2300]
    with start("first", dtype="float32", endpoint=daemon.endpoint) as first:
        same(first.answer(prompt), plain_float32["piece"])
        daemon.await_blocks(2)
        with start("tuned", dtype="float32", endpoint=daemon.endpoint, model=other_model) as tuned:
            cold = tuned.answer(prompt)
            assert cold.cached == 0
            daemon.await_blocks(4)
            again = tuned.answer(prompt)
            assert again.cached == whole(prompt)
            same(again, cold)
            assert max(abs(a - b) for a, b in zip(cold.logprobs, plain_float32["piece"].logprobs, strict=True)) > 1e-3
        again = first.answer(prompt)
        assert again.cached == whole(prompt)
        same(again, plain_float32["piece"])


def test_with_a_wrong_socket_prompts_are_computed_and_the_log_says_so(
    start, make_daemon, plain_float32, text, whole, same
):
    """And when a daemon comes to be there, it is used without a restart of the engine."""
    prompt = text[2000:2300]
    late = make_daemon("late")
    endpoint = f"ipc://{late.runtime_dir}/default/kvtierd.sock"
    # Few blocks: three requests that grow do not fit, and some are preempted.
    options = {"max_model_len": 512, "num_gpu_blocks_override": 9}
    with start("late", dtype="float32", endpoint=endpoint, **options) as engine:
        alone = engine.answer(prompt)
        assert alone.cached == 0
        same(alone, plain_float32["piece"])
        assert "not there yet" in engine.log()
        assert "there is no such socket" in engine.log()
        with late:
            assert late.endpoint == endpoint
            for _ in range(20):
                engine.answer(prompt, 2)
                if late.blocks():
                    break
            late.await_blocks(2)
            assert engine.answer(prompt).cached == whole(prompt)
            growing = [text[at : at + 250] for at in (0, 400, 800)]
            for answers in (engine.generate(growing, 150), engine.generate(growing, 150)):
                for i, answer in enumerate(answers):
                    assert answer.tokens == plain_float32[f"growing{i}"].tokens
