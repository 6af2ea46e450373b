"""What the SGLang backend is made of, without SGLang: which prefixes pools can serve, and bytes in several places."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.connectors.pieces import gather, memory_at, scatter
from kvtierd.connectors.sglang_hits import ends_with_all_pages, ends_with_trailing_pages, longest
from kvtierd.core.checksum import PIECE_BYTES, layer_sum

FLAGS = st.lists(st.booleans(), max_size=20).map(lambda flags: np.array(flags, np.bool_))


@given(FLAGS)
def test_every_page_must_be_there(there):
    wanted = [bool(there[: end + 1].all()) for end in range(there.size)]
    assert ends_with_all_pages(there).tolist() == wanted


@given(FLAGS, st.integers(1, 5))
def test_only_the_last_pages_must_be_there(there, trailing):
    wanted = [bool(there[max(0, end + 1 - trailing) : end + 1].all()) for end in range(there.size)]
    assert ends_with_trailing_pages(there, trailing).tolist() == wanted


def test_the_longest_is_the_last_that_can_be_served():
    assert longest(np.array([True, False, True, False])) == 3
    assert longest(np.array([False])) == 0
    assert longest(np.empty(0, np.bool_)) == 0


@given(st.lists(st.sampled_from([1, 7, 4096, PIECE_BYTES, PIECE_BYTES + 5]), min_size=1, max_size=5))
def test_pieces_are_gathered_and_scattered_with_the_hash_of_the_whole(sizes):
    whole = np.random.default_rng(len(sizes)).integers(0, 256, sum(sizes), np.uint8)
    pieces = np.split(whole, np.cumsum(sizes)[:-1])
    slot = np.ones(sum(sizes) + 100, np.uint8)
    assert gather(pieces, slot) == layer_sum(whole)
    assert (slot[: whole.size] == whole).all()
    assert not slot[whole.size :].any()
    target = np.zeros(whole.size, np.uint8)
    assert scatter(slot, np.split(target, np.cumsum(sizes)[:-1])) == layer_sum(whole)
    assert (target == whole).all()


def test_a_slot_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="broadcast"):
        gather([np.ones(10, np.uint8)], np.zeros(9, np.uint8))


def test_memory_at_an_address_is_no_copy():
    there = np.arange(10, dtype=np.uint8)
    here = memory_at(there.ctypes.data + 2, 4)
    here[:] = 0
    assert there.tolist() == [0, 1, 0, 0, 0, 0, 6, 7, 8, 9]
