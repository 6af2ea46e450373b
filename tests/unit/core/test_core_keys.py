"""Block keys: a chain over the prefix that depends on nothing but what is hashed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtierd.core.keys import KEY_BYTES, as_keys, block_keys, foreign_key

DIGEST = bytes(range(32))
OTHER_DIGEST = bytes(range(1, 33))
TOKENS = list(range(1000, 1064))


def as_list(keys: np.ndarray) -> list[bytes]:
    return [key.tobytes() for key in keys]


def test_shape_and_dtype() -> None:
    keys = block_keys(DIGEST, TOKENS, 16)
    assert keys.shape == (4, KEY_BYTES)
    assert keys.dtype == np.uint8
    assert keys.flags.c_contiguous


def test_a_tail_shorter_than_a_block_has_no_key() -> None:
    assert as_list(block_keys(DIGEST, TOKENS[:-1], 16)) == as_list(block_keys(DIGEST, TOKENS, 16))[:3]
    assert block_keys(DIGEST, TOKENS[:15], 16).shape == (0, KEY_BYTES)
    assert block_keys(DIGEST, [], 16).shape == (0, KEY_BYTES)


def test_a_key_depends_on_every_token_before_it() -> None:
    before = as_list(block_keys(DIGEST, TOKENS, 16))
    for position in (0, 15, 16, 63):
        changed = list(TOKENS)
        changed[position] += 1
        after = as_list(block_keys(DIGEST, changed, 16))
        same = [a == b for a, b in zip(before, after, strict=True)]
        assert same == [block < position // 16 for block in range(4)]


def test_equal_blocks_at_different_places_have_different_keys() -> None:
    keys = as_list(block_keys(DIGEST, [7] * 64, 16))
    assert len(set(keys)) == 4


def test_another_namespace_gives_other_keys() -> None:
    first, second = as_list(block_keys(DIGEST, TOKENS, 16)), as_list(block_keys(OTHER_DIGEST, TOKENS, 16))
    assert not set(first) & set(second)


def test_an_extra_changes_its_block_and_all_after_it() -> None:
    plain = as_list(block_keys(DIGEST, TOKENS, 16))
    salted = as_list(block_keys(DIGEST, TOKENS, 16, extras={2: b"image"}))
    assert plain[:2] == salted[:2]
    assert plain[2] != salted[2]
    assert plain[3] != salted[3]


def test_an_empty_extra_is_no_extra() -> None:
    assert as_list(block_keys(DIGEST, TOKENS, 16, extras={1: b""})) == as_list(block_keys(DIGEST, TOKENS, 16))


def test_an_extra_cannot_pose_as_tokens() -> None:
    token = (5).to_bytes(4, "little")
    with_extra = block_keys(DIGEST, [6], 1, extras={0: token})
    assert as_list(with_extra) != as_list(block_keys(DIGEST, [5, 6], 2))


def test_a_parent_continues_the_chain() -> None:
    whole = block_keys(DIGEST, TOKENS, 16)
    rest = block_keys(DIGEST, TOKENS[32:], 16, parent=whole[1].tobytes())
    assert as_list(rest) == as_list(whole)[2:]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, np.uint32, np.uint64, ">i4"])
def test_the_integer_type_of_the_tokens_does_not_matter(dtype: str) -> None:
    assert as_list(block_keys(DIGEST, np.array(TOKENS, dtype), 16)) == as_list(block_keys(DIGEST, TOKENS, 16))


def test_a_strided_token_array_is_hashed_by_value() -> None:
    spread = np.repeat(np.array(TOKENS), 3)[::3]
    assert as_list(block_keys(DIGEST, spread, 16)) == as_list(block_keys(DIGEST, TOKENS, 16))


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ([1, -1], "token id -1"),
        ([1, 2**32], "token id 4294967296"),
        ([1, 2**64], "token id 18446744073709551616"),
        ([-5, 2**63], "token id -5"),
        ([1.5, 2.0], "float64"),
        ([True, False], "bool"),
        (["1", "2"], "integers are wanted"),
        ([[1, 2], [3, 4]], r"shape \(2, 2\)"),
        ([[1, 2], [3]], "flat sequence"),
        (np.array([1, -3], np.int8), "token id -3"),
    ],
)
def test_bad_tokens_are_named(tokens: list[int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        block_keys(DIGEST, tokens, 1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"namespace_digest": b"short"}, "namespace_digest has 5 bytes; 32"),
        ({"parent": b""}, "parent has 0 bytes; 32"),
        ({"block_size": 0}, "block_size is 0"),
        ({"extras": {4: b"x"}}, "block 4, but there are 4"),
        ({"extras": {-1: b"x"}}, "block -1"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], named: str) -> None:
    good: dict[str, object] = {"namespace_digest": DIGEST, "tokens": TOKENS, "block_size": 16}
    with pytest.raises(ValueError, match=named):
        block_keys(**{**good, **arguments})  # type: ignore[arg-type]


def test_a_foreign_hash_is_bound_to_its_namespace() -> None:
    engine_hash = block_keys(DIGEST, TOKENS, 16)[0].tobytes()
    key = foreign_key(DIGEST, engine_hash)
    assert len(key) == KEY_BYTES
    assert key != engine_hash
    assert key != foreign_key(OTHER_DIGEST, engine_hash)
    with pytest.raises(ValueError, match="namespace_digest has 31 bytes"):
        foreign_key(DIGEST[1:], engine_hash)


def test_as_keys_is_a_view() -> None:
    data = bytearray(range(64))
    keys = as_keys(memoryview(data))
    assert keys.shape == (2, KEY_BYTES)
    data[0] = 99
    assert keys[0, 0] == 99
    assert np.shares_memory(as_keys(keys), keys)
    assert as_keys(b"").shape == (0, KEY_BYTES)


def test_as_keys_names_a_wrong_length_and_a_wrong_type() -> None:
    with pytest.raises(ValueError, match="33 bytes"):
        as_keys(bytes(33))
    with pytest.raises(ValueError, match="int64"):
        as_keys(np.zeros(32, np.int64))  # type: ignore[arg-type]


def test_case_08_two_interpreters_with_other_hash_seeds_make_equal_keys() -> None:
    program = (
        "from kvtierd.core.geometry import Geometry\n"
        "from kvtierd.core.keys import block_keys\n"
        "from kvtierd.core.namespace import Namespace\n"
        "shape = Geometry(block_size=4, layers=2, kv_heads=2, k_dim=8, v_dim=8)\n"
        "space = Namespace(model='m', geometry=shape, lora='a')\n"
        "print(block_keys(space.digest(), list(range(64)), 4, extras={3: b'x'}).tobytes().hex())\n"
    )
    root = Path(__file__).resolve().parents[3]
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(seen) == 1
    assert len(seen.pop().strip()) == 16 * KEY_BYTES * 2
