"""Engines that differ in what shapes KV never share a block; and an engine whose daemon is elsewhere, or short of
memory, answers as one without."""

from __future__ import annotations

import shutil

import pytest

from kvtierd.testing.vllm_engine import CONNECTOR
from kvtierd.testing.waiting import wait_for


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


@pytest.fixture(scope="module")
def fault(tmp_path_factory):
    return tmp_path_factory.mktemp("fault") / "on"


@pytest.fixture(scope="module")
def late(make_daemon):
    return make_daemon("late")


@pytest.fixture(scope="module")
def small_engine(start, late, fault):
    """With few blocks, a socket that is not there yet, and loads that can be made to fail."""
    return start(
        "small",
        dtype="float32",
        endpoint=f"ipc://{late.runtime_dir}/default/kvtierd.sock",
        connector={
            **CONNECTOR,
            "kv_connector_module_path": "kvtierd.testing.vllm_faults",
            "kv_connector_extra_config": {"lookup_timeout_ms": 5000},
        },
        environment={"KVTIERD_TEST_FAULT": str(fault)},
        max_model_len=640,
        num_gpu_blocks_override=9,
        disable_log_stats=False,
    )


def test_socket_that_is_not_there_then_preemption_then_loads_that_fail(
    small_engine, late, fault, plain_float32, text, whole, same
):
    """One engine for all three: its start is what takes time."""
    prompt = text[2000:2300]
    with small_engine as engine:
        alone = engine.answer(prompt)
        assert alone.cached == 0
        same(alone, plain_float32["piece"])
        assert "not there yet" in engine.log()
        assert "there is no such socket" in engine.log()
        with late:
            wait_for(lambda: "is back" in engine.log())
            engine.answer(prompt, 2)
            late.await_blocks(2)
            assert engine.answer(prompt).cached == whole(prompt)
            preempted_requests_go_on(engine, plain_float32, text)
            failed_loads_are_computed(engine, fault, text, late)


def preempted_requests_go_on(engine, plain_float32, text):
    """Three requests that grow to four blocks each do not fit into eight. The second time, what was stored is loaded,
    also by those that were preempted."""
    growing = [text[at : at + 250] for at in (0, 400, 800)]
    for _ in range(2):
        before = engine.metric("vllm:num_preemptions")
        answers = engine.generate(growing, 150)
        assert engine.metric("vllm:num_preemptions") > before
        assert [answer.tokens for answer in answers] == [plain_float32[f"growing{i}"].tokens for i in range(3)]


def failed_loads_are_computed(engine, fault, text, late):
    """The blocks behind the second are poisoned in the engine's memory: only computing them anew gives these tokens."""
    prompt = text[3000:3600]
    before = late.blocks()
    cold = engine.answer(prompt, 16)
    late.await_blocks(before + 4)
    fault.touch()
    for _ in range(2):
        assert engine.answer(prompt, 16).tokens == cold.tokens
    fault.unlink()
    loaded = engine.answer(prompt, 16)
    assert (loaded.tokens, loaded.cached) == (cold.tokens, 512)
    assert "Recovered from KV load failure" in engine.log()
