from __future__ import annotations

import numpy as np
import pytest

from kvtierd.index.hybrid import HybridIndex


def numbers(*values):
    return np.array(values, np.int64)


def extents(*values):
    return np.array(values, np.int32)


def spans(index):
    """(first token, tokens, place, offset) of every extent, in order."""
    return index.describe(index.overlapping(0, index.tokens)).tolist()


def test_extents_of_several_sizes_lie_side_by_side():
    index = HybridIndex(4096)
    made = [index.append(tokens, place) for place, tokens in enumerate([64, 512, 128])]
    assert index.tokens == 704
    assert spans(index) == [[0, 64, 0, 0], [64, 512, 1, 0], [576, 128, 2, 0]]
    assert index.locate(numbers(0, 63, 64, 575, 576, 703)).tolist() == [made[i] for i in (0, 0, 1, 1, 2, 2)]
    assert index.overlapping(63, 65).tolist() == made[:2]
    assert index.overlapping(64, 64).tolist() == []


def test_a_block_may_lie_in_several_extents_and_an_extent_hold_several_blocks():
    index = HybridIndex(4096)
    one, two = index.append(64, 0), index.append(448, 1)
    blocks = [index.overlapping(begin, begin + 128).tolist() for begin in range(0, 512, 128)]
    assert blocks == [[one, two], [two], [two], [two]]


def test_a_split_moves_nothing_and_a_merge_says_where_to():
    index = HybridIndex(4096)
    index.append(128, 7)
    middle = index.append(512, 8)
    index.append(64, 9)
    parts = index.split(middle, numbers(64, 320, 128))
    assert parts[0] == middle
    assert spans(index)[1:4] == [[128, 64, 8, 0], [192, 320, 8, 64], [512, 128, 8, 384]]
    merged = index.merge(parts[1:], place=30)
    assert merged == parts[1]
    assert spans(index) == [[0, 128, 7, 0], [128, 64, 8, 0], [192, 448, 30, 0], [640, 64, 9, 0]]


def test_a_span_assigned_is_cut_out_of_what_held_it():
    index = HybridIndex(4096)
    index.append_many(256, extents(0, 1, 2))
    index.assign(numbers(128, 448), 256, extents(-1, 5))
    assert spans(index) == [[0, 128, 0, 0], [128, 256, -1, 0], [384, 64, 1, 128], [448, 256, 5, 0], [704, 64, 2, 192]]
    assert index.placed(64, 385).tolist() == [[0, 128, 0, 0], [384, 64, 1, 128]]
    index.assign(numbers(), 256, extents())
    index.assign(numbers(0), 512, extents(7))
    assert spans(index)[0] == [0, 512, 7, 0]
    assert spans(index)[1] == [512, 192, 5, 64]


def test_numbers_of_merged_extents_are_used_again():
    index = HybridIndex(1024)
    made = [index.append(64, place) for place in range(8)]
    index.merge(extents(*made), place=1)
    with pytest.raises(ValueError, match="not all in the sequence"):
        index.describe(extents(made[3]))
    again = index.split(made[0], numbers(*[64] * 8))
    assert sorted(again.tolist()) == made


def test_uses_are_counted_by_part_and_outlive_split_and_merge():
    index = HybridIndex(1024)
    whole = index.append(256, 0)
    index.touch(0, 256)
    index.touch(65, 66)
    assert index.uses(whole).tolist() == [1, 2, 1, 1]
    parts = index.split(whole, numbers(64, 192))
    assert index.uses(int(parts[1])).tolist() == [2, 1, 1]
    assert index.uses(index.merge(parts, 5)).tolist() == [1, 2, 1, 1]


@pytest.mark.parametrize("tokens", [0, -64, 63, 65, 576])
def test_sizes_that_no_extent_may_have_are_named(tokens):
    index = HybridIndex(4096)
    whole = index.append(512, 0)
    with pytest.raises(ValueError, match=f"extent of {tokens} tokens"):
        index.append(tokens, 0)
    with pytest.raises(ValueError, match=f"extent of {tokens} tokens"):
        index.split(whole, numbers(tokens, 512 - tokens))
    assert spans(index) == [[0, 512, 0, 0]]


def test_what_does_not_fit_changes_nothing():
    index = HybridIndex(640)
    one = index.append(512, 0)
    two = index.append(128, 1)
    before = spans(index)
    for call, text in [
        (lambda: index.append(64, 2), "64 tokens after 640 are over 640"),
        (lambda: index.split(one, numbers(64, 64)), "parts of 128 tokens do not make the 512"),
        (lambda: index.merge(extents(one, two), 3), "extent of 640 tokens"),
        (lambda: index.merge(extents(two, one), 3), "not neighbours in order"),
        (lambda: index.merge(extents(), 3), "not neighbours in order"),
        (lambda: index.merge(extents(one, 9), 3), "not all in the sequence"),
        (lambda: index.locate(numbers(640)), r"not all in 0\.\.639"),
        (lambda: index.overlapping(0, 641), r"not within 0\.\.640"),
        (lambda: index.assign(numbers(0, 576), 128, extents(1, 1)), r"each of 0\.\.576 are not all whole granules"),
        (lambda: index.assign(numbers(32), 128, extents(1)), "not all whole granules"),
        (lambda: index.assign(numbers(0), 100, extents(1)), "extent of 100 tokens"),
        (lambda: index.append_many(64, extents(1, 1)), "128 tokens after 640"),
        (lambda: index.touch(-1, 5), r"not within 0\.\.640"),
        (lambda: index.uses(2), "not all in the sequence"),
    ]:
        with pytest.raises(ValueError, match=text):
            call()
    assert spans(index) == before


@pytest.mark.parametrize("tokens", [0, 100, -64])
def test_a_length_that_is_no_sequence_is_named(tokens):
    with pytest.raises(ValueError, match=f"tokens_max is {tokens}"):
        HybridIndex(tokens)
