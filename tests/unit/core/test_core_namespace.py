"""Namespaces: every field counts, and the encoding is what the specification says."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvtierd.core.geometry import Geometry
from kvtierd.core.namespace import MAX_TEXT_BYTES, Namespace

SHAPE = Geometry(block_size=16, layers=2, kv_heads=2, k_dim=64, v_dim=64)
BASE = Namespace(model="m", geometry=SHAPE, tp_size=4, pp_size=4)

CHANGED_FIELDS: dict[str, Any] = {
    "model": "n",
    "revision": "r2",
    "tenant_salt": "other",
    "lora": "adapter",
    "lora_version": "2",
    "rope_digest": "yarn",
    "quantisation": "awq",
    "tp_rank": 1,
    "tp_size": 8,
    "pp_rank": 1,
    "pp_size": 8,
    "group": 1,
}
CHANGED_SHAPE: dict[str, Any] = {
    "block_size": 32,
    "layers": 3,
    "kv_heads": 4,
    "k_dim": 128,
    "v_dim": 128,
    "dtype": "fp16",
    "layout": "hnd",
}


def test_the_canonical_encoding_by_hand() -> None:
    space = Namespace(
        model="m",
        geometry=Geometry(block_size=4, layers=1, kv_heads=2, k_dim=3, v_dim=5, dtype="fp32", layout="hnd"),
        tenant_salt="s",
        revision="r",
        tp_rank=1,
        tp_size=2,
    )
    expected = (
        b"\x0d\0\0\0tenant_salt=s\x07\0\0\0model=m\x0a\0\0\0revision=r\x05\0\0\0lora=\x0d\0\0\0lora_version="
        b"\x0c\0\0\0rope_digest=\x0d\0\0\0quantisation=\x0a\0\0\0dtype=fp32\x0a\0\0\0layout=hnd"
        b"\x0c\0\0\0block_size=4\x08\0\0\0layers=1\x0a\0\0\0kv_heads=2\x07\0\0\0k_dim=3\x07\0\0\0v_dim=5"
        b"\x09\0\0\0tp_rank=1\x09\0\0\0tp_size=2\x09\0\0\0pp_rank=0\x09\0\0\0pp_size=1\x07\0\0\0group=0"
        b"\x08\0\0\0format=1"
    )
    assert space.canonical() == expected


def test_the_lists_above_name_every_field() -> None:
    fields = {field.name for field in msgspec.structs.fields(Namespace)}
    assert {*CHANGED_FIELDS, "geometry"} == fields
    assert set(CHANGED_SHAPE) == {field.name for field in msgspec.structs.fields(Geometry)}


@pytest.mark.parametrize("field", CHANGED_FIELDS)
def test_case_07_a_change_of_any_field_is_another_namespace(field: str) -> None:
    changed = msgspec.structs.replace(BASE, **{field: CHANGED_FIELDS[field]})
    assert changed.digest() != BASE.digest()


@pytest.mark.parametrize("field", CHANGED_SHAPE)
def test_case_07_a_change_of_any_part_of_the_shape_is_another_namespace(field: str) -> None:
    shape = msgspec.structs.replace(SHAPE, **{field: CHANGED_SHAPE[field]})
    changed = msgspec.structs.replace(BASE, geometry=shape)
    assert changed.digest() != BASE.digest()


def test_case_07_bf16_and_fp16_of_the_same_size_do_not_share() -> None:
    half = msgspec.structs.replace(SHAPE, dtype="fp16")
    assert half.block_bytes == SHAPE.block_bytes
    assert msgspec.structs.replace(BASE, geometry=half).digest() != BASE.digest()


def test_case_06_every_rank_has_a_namespace_of_its_own() -> None:
    ranks = [
        Namespace(model="m", geometry=SHAPE, tp_rank=tp, tp_size=4, pp_rank=pp, pp_size=2)
        for tp in range(4)
        for pp in range(2)
    ]
    assert len({space.digest() for space in ranks}) == 8


def test_text_cannot_cross_from_one_field_into_the_next() -> None:
    first = Namespace(model="m", geometry=SHAPE, lora="ab", lora_version="c")
    second = Namespace(model="m", geometry=SHAPE, lora="a", lora_version="bc")
    posing = Namespace(model="m\x07\0\0\0lora=x", geometry=SHAPE)
    assert len({first.digest(), second.digest(), posing.digest()}) == 3


def test_equal_namespaces_have_equal_digests_after_a_round_trip() -> None:
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(BASE), type=Namespace)
    assert copy == BASE
    assert copy.digest() == BASE.digest()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": ""}, "model is empty"),
        ({"model": "x" * (MAX_TEXT_BYTES + 1)}, f"model has {MAX_TEXT_BYTES + 1} bytes"),
        ({"lora": "ü" * MAX_TEXT_BYTES}, f"lora has {2 * MAX_TEXT_BYTES} bytes"),
        ({"model": "\ud800"}, "surrogates"),
        ({"tp_rank": 1}, "tp_rank 1 is not in"),
        ({"tp_rank": -1}, "tp_rank -1"),
        ({"pp_rank": 2, "pp_size": 2}, "pp_rank 2"),
        ({"pp_size": 65537}, "pp_size 65537"),
        ({"tp_size": 0}, "tp_size 0"),
        ({"group": 65536}, "group is 65536"),
        ({"group": -1}, "group is -1"),
        ({"tp_size": 2.0}, "tp_size is 2.0; an integer"),
        ({"group": True}, "group is True; an integer"),
        ({"revision": 5}, "revision is 5; a text"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Namespace(**{"model": "m", "geometry": SHAPE, **fields})


def test_a_text_at_the_limit_is_taken() -> None:
    assert len(Namespace(model="x" * MAX_TEXT_BYTES, geometry=SHAPE).digest()) == 32
