"""From vLLM's configuration to a namespace: whatever shapes KV changes it, and what cannot be served is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtierd.connectors.vllm_adapters import Adapters
from kvtierd.connectors.vllm_identity import check_config, model_facts, model_name
from kvtierd.connectors.vllm_plan import ModelFacts, RankShape, namespace_of
from kvtierd.connectors.vllm_settings import Settings
from kvtierd.core.geometry import Geometry

SHAPE = Geometry(block_size=16, layers=2, kv_heads=2, k_dim=8, v_dim=8, layout="opaque:test")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tmp_path / "model"
    target.mkdir()
    (target / "model.safetensors").write_bytes(b"weights")
    (target / "config.json").write_text("{}")
    return target


def config(folder: Path | str, **changes: Any) -> Any:
    """vLLM's configuration as far as it is looked at; `changes` by dotted name with `__` for the dot."""
    text = SimpleNamespace(rope_theta=10_000.0, rope_scaling=None)
    made = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder),
            revision=None,
            seed=0,
            quantization=None,
            quantization_config=None,
            dtype="torch.bfloat16",
            hf_text_config=text,
            hf_overrides={},
            max_model_len=4096,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        part = made
        for step in path:
            part = getattr(part, step)
        setattr(part, last, value)
    return made


def facts(folder: Path | str, settings: Settings | None = None, **changes: Any) -> ModelFacts:
    return model_facts(config(folder, **changes), settings or Settings())


@pytest.mark.parametrize(
    "change",
    [
        {"model_config__quantization": "fp8"},
        {"model_config__quantization_config": {"bits": 4}},
        {"model_config__dtype": "torch.float16"},
        {"model_config__hf_text_config__rope_theta": 500_000.0},
        {"model_config__hf_text_config__rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"model_config__hf_overrides": {"sliding_window": 100}},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__kv_cache_dtype_skip_layers": ["0"]},
        {"load_config__load_format": "dummy"},
    ],
)
def test_case_07_whatever_shapes_kv_is_in_the_namespace(folder, change):
    assert facts(folder) == facts(folder)
    assert facts(folder, **change) != facts(folder)


def test_case_07_other_weights_are_another_model(folder):
    before = facts(folder)
    (folder / "model.safetensors").write_bytes(b"tuned")
    after = facts(folder)
    assert (after.model, after.rope_digest) == (before.model, before.rope_digest)
    assert after.revision != before.revision


def test_what_does_not_shape_kv_is_not_in_the_namespace(folder, tmp_path):
    moved = tmp_path / "elsewhere" / "model"
    moved.parent.mkdir()
    before = facts(folder)
    folder.rename(moved)
    assert facts(moved) == before
    assert facts(moved, model_config__max_model_len=512) == before


@pytest.mark.parametrize(
    "scaling", [{"rope_type": "dynamic", "factor": 2.0}, {"full": {"type": "longrope"}, "sliding": {"type": "default"}}]
)
def test_the_length_counts_where_angles_depend_on_it(folder, scaling):
    options = {"model_config__hf_text_config__rope_scaling": scaling}
    assert facts(folder, **options) != facts(folder, model_config__max_model_len=512, **options)


def test_a_user_may_name_the_weights(folder):
    named = facts(folder, Settings(model="m", revision="r", tenant_salt="t"))
    assert (named.model, named.revision, named.tenant_salt) == ("m", "r", "t")


def test_a_model_in_the_hubs_cache_is_known_by_its_commit(tmp_path):
    folder = tmp_path / "models--a--b" / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    assert facts(folder).revision == "0123abcd"


def test_the_name_is_the_folders_or_the_hubs(folder):
    assert model_name(str(folder)) == "model"
    assert model_name("org/model") == "org/model"


def cache(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def spec(kind: str, **fields: Any) -> Any:
    return type(kind, (), fields)()


FULL = spec("FullAttentionSpec", non_causal=False)


def test_case_25_full_attention_is_served():
    assert check_config(config("m"), cache(FULL)) is FULL
    latent = spec("MLAAttentionSpec")
    assert check_config(config("m"), cache(latent)) is latent


@pytest.mark.parametrize(
    ("made", "specs", "says"),
    [
        ({}, (FULL, spec("SlidingWindowSpec")), "2 .FullAttentionSpec, SlidingWindowSpec.*disable-hybrid"),
        ({}, (spec("MambaSpec"),), "MambaSpec"),
        ({}, (spec("SlidingWindowSpec"),), "SlidingWindowSpec"),
        ({}, (spec("FullAttentionSpec", non_causal=True),), "later tokens"),
        ({"parallel_config__decode_context_parallel_size": 2}, (FULL,), "decode_context_parallel_size=2"),
        ({"parallel_config__prefill_context_parallel_size": 2}, (FULL,), "prefill_context_parallel_size=2"),
        ({"cache_config__calculate_kv_scales": True}, (FULL,), "calculate_kv_scales"),
    ],
)
def test_case_25_what_is_not_served_is_refused_by_name(made, specs, says):
    with pytest.raises(ValueError, match=says):
        check_config(config("m", **made), cache(*specs))


def test_case_06_ranks_have_namespaces_of_their_own(folder):
    shapes = [
        RankShape(geometry=SHAPE, tp_rank=tp, tp_size=2, pp_rank=pp, pp_size=2) for pp in range(2) for tp in range(2)
    ]
    assert len({namespace_of(facts(folder), shape).digest() for shape in shapes}) == 4
    assert [shape.position for shape in shapes] == [0, 1, 2, 3]


def adapter(folder: Path, number: int = 1, **options: Any) -> Any:
    return SimpleNamespace(lora_name="a", lora_int_id=number, lora_path=str(folder), **options)


def test_case_07_an_adapter_is_another_namespace_and_one_that_is_loaded_again_too(folder):
    adapters = Adapters(ModelFacts(model="m", revision="r"))
    assert adapters.facts(None) == adapters.base
    first = adapters.facts(adapter(folder))
    assert first.lora == "a"
    (folder / "model.safetensors").write_bytes(b"trained further")
    assert adapters.facts(adapter(folder)) == first  # the engine has not loaded it again
    again = adapters.facts(adapter(folder, load_inplace=True))
    assert again.lora_version != first.lora_version
    assert adapters.facts(adapter(folder)) == again


def test_an_adapter_that_is_not_here_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no local folder"):
        Adapters(ModelFacts(model="m", revision="r")).facts(adapter(tmp_path / "none"))


def test_weights_changed_in_place_have_a_new_name_each_time():
    adapters = Adapters(ModelFacts(model="m", revision="r"))
    names = [adapters.base.revision]
    for _ in range(2):
        adapters.renew()
        names.append(adapters.base.revision)
    assert len(set(names)) == 3
    assert all(name.startswith("r") and len(name) < 40 for name in names)
