"""Keys of a vLLM request: of all that shapes its KV, the same however they were grown."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvtierd.connectors.vllm_keys import Feature, RequestKeys, features_of
from kvtierd.core.keys import block_keys
from kvtierd.testing.vllm_requests import FakeRequest, fake_feature

DIGESTS = [bytes([i]) * 32 for i in range(2)]
TOKENS = list(range(100, 140))


def grown(tokens=TOKENS, blocks=10, steps=(10,), **options):
    keys = RequestKeys(DIGESTS, 4, **options)
    for count in steps:
        keys.grow(tokens, count)
    assert keys.count == blocks
    return keys.keys(0, blocks)


def test_keys_are_those_of_the_core_for_each_rank():
    for keys, digest in zip(grown(), DIGESTS, strict=True):
        assert np.array_equal(keys, block_keys(digest, TOKENS, 4))


def test_keys_grown_in_steps_are_those_grown_at_once():
    features = (Feature("image", 5, 30),)
    once = grown(salt="s", features=features)
    steps = grown(salt="s", features=features, steps=(1, 1, 4, 3, 10))
    assert all(np.array_equal(a, b) for a, b in zip(once, steps, strict=True))


def test_parent_is_the_key_before():
    keys = RequestKeys(DIGESTS, 4)
    keys.grow(TOKENS, 10)
    assert keys.parents(0) == (b"", b"")
    assert keys.parents(4) == tuple(part[3].tobytes() for part in keys.keys(0, 10))


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({"salt": "x"}, 0),
        ({"features": (Feature("a", 9, 10),)}, 2),
        ({"features": (Feature("b", 9, 10),)}, 2),
        ({"features": (Feature("a", 10, 11),)}, 2),
        ({"features": (Feature("a", 9, 13),)}, 2),
    ],
)
def test_whatever_shapes_the_kv_changes_the_keys_from_its_block_on(options, first):
    plain, other = grown()[0], grown(**options)[0]
    equal = (plain == other).all(axis=1)
    assert equal[:first].all()
    assert not equal[first:].any()


def test_inputs_at_other_places_have_other_keys():
    """Two images behind the same placeholder tokens: where one ends shows in no token."""
    one = grown(features=(Feature("a", 0, 8), Feature("b", 8, 16)))
    two = grown(features=(Feature("a", 0, 10), Feature("b", 10, 16)))
    assert not np.array_equal(one[0], two[0])


def test_a_salt_is_not_taken_for_an_image():
    assert not np.array_equal(grown(salt="a")[0], grown(features=(Feature("a", 0, 4),))[0])


def test_features_come_from_the_request():
    request = FakeRequest("r", TOKENS, mm_features=[fake_feature("hash", 3, 7)])
    assert features_of(request) == (Feature("hash", 3, 10),)


def test_case_08_keys_do_not_depend_on_the_hash_seed():
    code = (
        "from kvtierd.connectors.vllm_keys import RequestKeys, Feature\n"
        "keys = RequestKeys([bytes(32)], 4, salt='s', features=(Feature('image', 2, 9),))\n"
        "keys.grow(list(range(40)), 10)\n"
        "print(keys.keys(0, 10)[0].tobytes().hex())"
    )
    seen = set()
    for seed in ("0", "1", "random"):
        run = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        seen.add(run.stdout)
    assert len(seen) == 1


def test_a_token_that_is_none_is_named():
    with pytest.raises(ValueError, match="-1"):
        grown(tokens=[*TOKENS[:7], -1, *TOKENS[8:]])
