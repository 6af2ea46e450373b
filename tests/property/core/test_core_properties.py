"""Properties of block identity and checksums over any input."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtierd.core.checksum import block_sum, copy_and_sum, fill_and_sum, layer_sums
from kvtierd.core.geometry import DTYPE_BYTES, LAYOUTS, Geometry
from kvtierd.core.keys import block_keys
from kvtierd.core.namespace import Namespace
from kvtierd.core.units import PAGE_BYTES, format_bytes, parse_bytes

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=60)
DIGESTS = st.binary(min_size=32, max_size=32)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
SHAPES = st.builds(
    Geometry,
    block_size=st.integers(1, 40),
    layers=st.integers(1, 5),
    kv_heads=st.integers(1, 4),
    k_dim=st.integers(1, 70),
    v_dim=st.integers(0, 70),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    layout=st.sampled_from(LAYOUTS),
)
NAMESPACES = st.builds(
    Namespace,
    model=TEXTS.filter(bool),
    geometry=SHAPES,
    revision=TEXTS,
    tenant_salt=TEXTS,
    lora=TEXTS,
    lora_version=TEXTS,
    rope_digest=TEXTS,
    quantisation=TEXTS,
    tp_rank=st.integers(0, 3),
    tp_size=st.integers(4, 8),
    group=st.integers(0, 9),
)


def as_list(keys: np.ndarray) -> list[bytes]:
    return [key.tobytes() for key in keys]


def without_empty(extras: dict[int, bytes], count: int) -> dict[int, bytes]:
    return {block: extra for block, extra in extras.items() if extra and block < count}


@given(DIGESTS, TOKENS, TOKENS, st.integers(1, 8))
def test_two_sequences_share_keys_exactly_over_their_common_blocks(
    digest: bytes, first: list[int], second: list[int], block_size: int
) -> None:
    common = 0
    while (
        common * block_size + block_size <= min(len(first), len(second))
        and first[: (common + 1) * block_size] == second[: (common + 1) * block_size]
    ):
        common += 1
    a, b = as_list(block_keys(digest, first, block_size)), as_list(block_keys(digest, second, block_size))
    assert a[:common] == b[:common]
    assert not set(a[common:]) & set(b[common:])


@given(DIGESTS, TOKENS, st.integers(1, 8), st.data())
def test_a_chain_can_be_cut_anywhere(digest: bytes, tokens: list[int], block_size: int, data: st.DataObject) -> None:
    count = len(tokens) // block_size
    cut = data.draw(st.integers(0, count))
    extras = data.draw(st.dictionaries(st.integers(0, max(count - 1, 0)), st.binary(max_size=9), max_size=3))
    extras = without_empty(extras, count)
    whole = block_keys(digest, tokens, block_size, extras=extras)
    head = block_keys(
        digest, tokens[: cut * block_size], block_size, extras={b: e for b, e in extras.items() if b < cut}
    )
    parent = {"parent": head[-1].tobytes()} if cut else {}
    tail_extras = {b - cut: e for b, e in extras.items() if b >= cut}
    tail = block_keys(digest, tokens[cut * block_size :], block_size, extras=tail_extras, **parent)
    assert as_list(whole) == as_list(head) + as_list(tail)


@given(
    DIGESTS,
    TOKENS,
    st.dictionaries(st.integers(0, 9), st.binary(min_size=1, max_size=9), min_size=1),
    st.integers(1, 8),
)
def test_other_extras_are_other_keys_from_the_first_difference_on(
    digest: bytes, tokens: list[int], extras: dict[int, bytes], block_size: int
) -> None:
    tokens = tokens + [7] * block_size  # a block at least
    extras = {block % (len(tokens) // block_size): extra for block, extra in extras.items()}
    first = min(extras)
    plain = as_list(block_keys(digest, tokens, block_size))
    salted = as_list(block_keys(digest, tokens, block_size, extras=extras))
    assert plain[:first] == salted[:first]
    assert not set(plain[first:]) & set(salted[first:])


@given(NAMESPACES, NAMESPACES)
def test_namespaces_are_equal_exactly_when_their_encodings_are(first: Namespace, second: Namespace) -> None:
    assert (first == second) == (first.canonical() == second.canonical())
    assert (first == second) == (first.digest() == second.digest())


@given(NAMESPACES)
def test_the_encoding_can_be_read_back(space: Namespace) -> None:
    data, fields = space.canonical(), {}
    while data:
        size = int.from_bytes(data[:4], "little")
        name, _, value = data[4 : 4 + size].decode().partition("=")
        fields[name] = value
        data = data[4 + size :]
    flat: dict[str, Any] = {**msgspec.to_builtins(space), **msgspec.to_builtins(space.geometry), "format": 1}
    del flat["geometry"]
    assert fields == {name: str(value) for name, value in flat.items()}


@given(SHAPES)
def test_sizes_add_up(shape: Geometry) -> None:
    assert shape.layer_stride % PAGE_BYTES == 0
    assert 0 <= shape.layer_stride - shape.layer_bytes < PAGE_BYTES
    assert shape.block_bytes == shape.layers * (shape.k_bytes + shape.v_bytes) <= shape.slot_bytes


@settings(max_examples=40)
@given(SHAPES, st.integers(0, 2**32 - 1))
def test_every_way_of_moving_a_block_gives_the_same_sums(shape: Geometry, seed: int) -> None:
    packed = np.random.default_rng(seed).integers(0, 256, shape.block_bytes, np.uint8)
    slot = np.full(shape.slot_bytes, 0xA5, np.uint8)
    filled, copied, unpacked = (np.zeros(shape.layers, np.uint64) for _ in range(3))
    fill_and_sum(packed, slot, shape, filled)
    other = np.full(shape.slot_bytes, 0x5A, np.uint8)
    copy_and_sum(slot, other, shape, copied)
    back = np.zeros(shape.block_bytes, np.uint8)
    copy_and_sum(other, back, shape, unpacked, packed=True)
    assert (back == packed).all()
    assert filled.tolist() == copied.tolist() == unpacked.tolist() == layer_sums(other, shape).tolist()
    assert block_sum(filled) == block_sum(unpacked)


@given(st.integers(0, 2**60))
def test_a_written_size_reads_back_within_its_digits(count: int) -> None:
    # Three digits of 1024-steps: at worst 1.005 against 1.00 is half a percent off.
    assert abs(parse_bytes(format_bytes(count)) - count) <= count * 0.005 + 0.5
