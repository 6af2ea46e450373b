"""Whose KV is it? Change anything that shapes it and it is a miss; change nothing and every process finds it."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtierd.connectors.model_identity import fingerprint, model_name
from kvtierd.connectors.transformers import PrefixStore
from kvtierd.daemon.embedded import EmbeddedDaemon

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

BLOCK = 32
ROOT = Path(__file__).resolve().parents[3]
NewStore = Callable[..., PrefixStore]

OTHER_PROCESS = """
import json, sys
import torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM
from kvtierd import Client
from kvtierd.connectors.demo_rig import prompt_ids
from kvtierd.connectors.transformers import PrefixStore
folder, endpoint, salt = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
prompt = prompt_ids(folder, 1000)[:, :200]
with Client(endpoint, timeout_s=20, transfer_timeout_s=20) as client:
    store = PrefixStore(client, model, tenant_salt=salt, block_size=32)
    output = store.generate(prompt, max_new_tokens=32, do_sample=False)
    print(json.dumps([store.counters.restored_tokens, store.counters.stored_blocks, output[0].tolist()]))
"""


def in_another_process(folder: Path, endpoint: str, salt: str, hash_seed: str) -> tuple[int, int, list[int]]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", OTHER_PROCESS, str(folder), endpoint, salt]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    restored, stored, tokens = json.loads(done.stdout)
    return restored, stored, tokens


@pytest.fixture
def seeded(new_store: NewStore, text_ids: torch.Tensor) -> PrefixStore:
    """A store whose prompt is stored: 6 blocks."""
    store = new_store()
    store.generate(text_ids[:, :200], max_new_tokens=1, do_sample=False)
    assert store.restore(text_ids[:, :200]).tokens == 6 * BLOCK
    return store


def test_case_08_interpreters_with_other_hash_seeds_share_blocks(
    folder: Path,
    daemon: EmbeddedDaemon,
    salt: str,
    new_store: NewStore,
    plain: Callable[..., torch.Tensor],
    text_ids: torch.Tensor,
) -> None:
    prompt = text_ids[:, :200]
    restored, stored, first = in_another_process(folder, daemon.endpoint, salt, "1")
    assert (restored, stored) == (0, 7)
    restored, stored, second = in_another_process(folder, daemon.endpoint, salt, "2")
    assert (restored, stored) == (6 * BLOCK, 0)
    assert new_store().restore(prompt).tokens == 6 * BLOCK
    assert first == second == plain(prompt, max_new_tokens=32, do_sample=False)[0].tolist()


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("change", [{"revision": "main"}, {"name": "other"}, {"block_size": 16}])
def test_case_07_another_name_revision_or_block_size_is_a_miss(
    change: dict[str, Any], new_store: NewStore, text_ids: torch.Tensor
) -> None:
    assert new_store(**change).restore(text_ids[:, :200]).tokens == 0


def test_case_07_a_model_in_another_dtype_is_a_miss_and_has_blocks_of_its_own(
    seeded: PrefixStore, new_store: NewStore, model: Any, text_ids: torch.Tensor
) -> None:
    prompt, half = text_ids[:, :200], copy.deepcopy(model).to(torch.bfloat16)
    other = new_store(model=half)
    assert other.namespace.geometry.dtype == "bf16"
    assert other.namespace.revision != seeded.namespace.revision
    assert other.restore(prompt).tokens == 0
    other.generate(prompt, max_new_tokens=1, do_sample=False)
    restored = other.restore(prompt)
    assert restored.tokens == 6 * BLOCK
    assert restored.cache.layers[0].keys.dtype == torch.bfloat16
    # The same revision does not make the dtypes one: float32 and bf16 blocks of one name stay apart.
    assert new_store(revision="x").namespace.digest() != new_store(revision="x", model=half).namespace.digest()


@pytest.fixture
def own_model(model: Any) -> Any:
    """A copy whose weights a test may change."""
    return copy.deepcopy(model)


def test_case_07_weights_changed_in_place_are_a_miss(
    new_store: NewStore, own_model: Any, text_ids: torch.Tensor
) -> None:
    prompt = text_ids[:, :100]
    store = new_store(model=own_model)
    store.generate(prompt, max_new_tokens=1, do_sample=False)
    before = store.namespace.revision
    with torch.no_grad():
        own_model.model.layers[3].self_attn.v_proj.weight.mul_(1.01)
    assert store.restore(prompt).tokens == 0
    assert store.namespace.revision != before


def test_one_changed_element_changes_the_fingerprint(own_model: Any, model: Any) -> None:
    before = fingerprint(model)
    assert fingerprint(own_model) == before
    with torch.no_grad():
        own_model.model.embed_tokens.weight[40_000, 7] += 1
    assert fingerprint(own_model) != before


def test_the_name_of_a_local_folder_is_its_last_part(model: Any, folder: Path) -> None:
    assert model_name(model) == folder.name


def test_another_rope_is_another_namespace(new_store: NewStore, own_model: Any, model: Any) -> None:
    own_model.config.rope_parameters = {**own_model.config.rope_parameters, "rope_theta": 10_000.0}
    ours, theirs = new_store(revision="x"), new_store(revision="x", model=own_model)
    assert ours.namespace.rope_digest != theirs.namespace.rope_digest
    assert model.config.rope_parameters["rope_theta"] != 10_000.0
