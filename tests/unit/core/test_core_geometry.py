"""From shapes to bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvtierd.core.geometry import DTYPE_BYTES, MAX_BLOCK_BYTES, Geometry
from kvtierd.core.namespace import Namespace

GOOD: dict[str, Any] = {"block_size": 16, "layers": 2, "kv_heads": 2, "k_dim": 64, "v_dim": 64}


def test_sizes_of_an_ordinary_block() -> None:
    shape = Geometry(block_size=128, layers=32, kv_heads=8, k_dim=128, v_dim=128)
    assert shape.k_bytes == shape.v_bytes == 128 * 8 * 128 * 2
    assert shape.layer_bytes == shape.layer_stride == 512 << 10
    assert shape.block_bytes == shape.slot_bytes == 16 << 20


def test_k_and_v_dims_may_differ() -> None:
    shape = Geometry(block_size=16, layers=3, kv_heads=4, k_dim=192, v_dim=128)
    assert shape.k_bytes == 16 * 4 * 192 * 2
    assert shape.v_bytes == 16 * 4 * 128 * 2
    assert shape.block_bytes == 3 * (shape.k_bytes + shape.v_bytes)


def test_latent_attention_has_one_vector_per_token() -> None:
    shape = Geometry(block_size=64, layers=61, kv_heads=1, k_dim=576, v_dim=0)
    assert shape.v_bytes == 0
    assert shape.layer_bytes == 64 * 576 * 2
    assert shape.layer_stride == 73728
    assert shape.block_bytes == 61 * 73728


def test_layer_parts_are_padded_to_pages() -> None:
    shape = Geometry(block_size=3, layers=5, kv_heads=1, k_dim=7, v_dim=9, dtype="int8")
    assert shape.layer_bytes == 48
    assert shape.layer_stride == 4096
    assert shape.block_bytes == 240
    assert shape.slot_bytes == 5 * 4096


def test_several_groups_are_several_namespaces_with_sizes_of_their_own() -> None:
    full = Namespace(model="hybrid", geometry=Geometry(**GOOD), group=0)
    window = Namespace(model="hybrid", geometry=Geometry(**{**GOOD, "layers": 10}), group=1)
    assert full.digest() != window.digest()
    assert window.geometry.block_bytes == 5 * full.geometry.block_bytes


@pytest.mark.parametrize(("dtype", "size"), sorted(DTYPE_BYTES.items()))
def test_every_dtype_has_its_size(dtype: str, size: int) -> None:
    assert Geometry(**GOOD, dtype=dtype).k_bytes == 16 * 2 * 64 * size


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": 65537}, "block_size is 65537"),
        ({"layers": 0}, "layers is 0"),
        ({"layers": 1025}, "layers is 1025"),
        ({"kv_heads": -1}, "kv_heads is -1"),
        ({"k_dim": 0}, "k_dim is 0"),
        ({"v_dim": -1}, "v_dim is -1"),
        ({"k_dim": 16.0}, "k_dim is 16.0; an integer"),
        ({"layers": True}, "layers is True; an integer"),
        ({"dtype": "float16"}, "dtype 'float16' is not one of bf16"),
        ({"layout": "nchw"}, "layout 'nchw' is not one of nhd"),
        ({"layout": "opaque:"}, "layout 'opaque:'"),
        ({"layout": "opaque:" + "x" * 300}, "layout has 307 bytes"),
        ({"block_size": 65536, "kv_heads": 4096, "k_dim": 65536}, "over the limit"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Geometry(**{**GOOD, **fields})


def test_a_block_at_the_limit_is_taken() -> None:
    shape = Geometry(block_size=1024, layers=1, kv_heads=1024, k_dim=256, v_dim=256)
    assert shape.slot_bytes == MAX_BLOCK_BYTES
    with pytest.raises(ValueError, match="over the limit"):
        msgspec.structs.replace(shape, v_dim=257)


def test_a_bad_shape_in_a_message_is_a_validation_error_that_names_it() -> None:
    data = msgspec.msgpack.encode({**GOOD, "layers": 0})
    with pytest.raises(msgspec.ValidationError, match="layers is 0"):
        msgspec.msgpack.decode(data, type=Geometry)


def test_an_opaque_layout_is_taken() -> None:
    assert Geometry(**GOOD, layout="opaque:vllm-cpu").layout == "opaque:vllm-cpu"
