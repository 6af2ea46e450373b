from __future__ import annotations

import numpy as np
import pytest

from kvtierd.index.key_tail import SHORT_KEYS, KeyTail
from kvtierd.index.watch import MATCHES_MAX, Watch

SECRET = bytes(range(16))


class Records:
    """Blocks elsewhere, as a block table holds them."""

    def __init__(self, keys, namespace=1):
        self.words = np.zeros((len(keys), 8), np.uint64)
        self.words.view(np.uint8)[:, :32] = keys
        self.words.view(np.uint16)[:, 26] = namespace

    def watched_by(self, watch):
        """(sequence, position, row) of every match, in any order."""
        rows = np.arange(len(self.words), dtype=np.int32)
        parts = [zip(*(part.tolist() for part in found), strict=True) for found in watch.matches(self.words, rows)]
        return sorted(match for part in parts for match in part)


def test_blocks_find_the_positions_of_their_keys(random_keys):
    watch, keys = Watch(1000), random_keys(200)
    blocks = Records(keys)
    numbers = watch.add(keys[50:150], 1, sequence=3, position=7)
    assert blocks.watched_by(watch) == [(3, 7 + i, 50 + i) for i in range(100)]
    assert Records(keys, namespace=2).watched_by(watch) == []
    assert (watch.keys(numbers) == keys[50:150]).all()
    watch.remove(numbers[:50])
    assert blocks.watched_by(watch) == [(3, 57 + i, 100 + i) for i in range(50)]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_sequences_that_share_keys_are_all_found_and_leave_one_by_one(random_keys, order):
    watch, keys = Watch(1000), random_keys(100)
    blocks = Records(keys)
    numbers = [watch.add(keys, 1, sequence, 0) for sequence in range(3)]
    left = {0, 1, 2}
    for sequence in order:
        assert blocks.watched_by(watch) == sorted((who, i, i) for who in left for i in range(100))
        watch.remove(numbers[sequence])
        left.remove(sequence)
    assert blocks.watched_by(watch) == []
    assert len(watch) == len(watch._pages) == 0


def test_a_key_watched_more_often_than_one_answer_holds_is_found_everywhere(random_keys):
    count = 2 * MATCHES_MAX + 5
    watch, keys = Watch(2 * count), random_keys(2)
    watch.add(np.repeat(keys[:1], count, axis=0), 1, 0, 0)
    watch.add(keys[1:], 1, 1, 0)
    assert Records(keys).watched_by(watch) == [(0, i, 0) for i in range(count)] + [(1, 0, 1)]


def test_a_full_watch_takes_the_first_ones_and_uses_again_what_was_given_back(random_keys):
    watch, keys = Watch(100), random_keys(200)
    first = watch.add(keys[:80], 1, 0, 0)
    assert watch.add(keys[80:], 1, 1, 0).size == 20
    assert watch.add(keys, 1, 2, 0).size == 0
    watch.remove(first)
    again = watch.add(keys[:90], 1, 3, 0)
    assert again.size == 80
    assert len(watch) == 100
    assert [match for match in Records(keys).watched_by(watch) if match[0] == 3] == [(3, i, i) for i in range(80)]


def test_keys_that_find_no_place_end_what_is_added(random_keys, colliding_keys):
    watch = Watch(100, SECRET)
    keys = colliding_keys(SECRET, 20, 16)
    mixed = np.concatenate([keys[:16], random_keys(3), keys[16:], keys[:1], random_keys(3)])
    assert watch.add(mixed, 1, 0, 0).size == 19
    assert len(watch) == len(watch._pages) == 19
    assert Records(mixed[:19]).watched_by(watch) == [(0, i, i) for i in range(19)]


@pytest.mark.parametrize("count", [10, SHORT_KEYS - 5, 5 * SHORT_KEYS])
def test_a_tail_of_keys_is_added_to_at_both_ends(random_keys, count):
    keys, tail = random_keys(count + 100), KeyTail(100_000)
    for begin in range(0, len(keys), 33):
        tail.append(keys[begin : begin + 33])
    tail.drop(100)
    assert (tail.begin, tail.end) == (100, len(keys))
    assert (tail.between(100, len(keys)) == keys[100:]).all()
    some = np.array([len(keys) - 1, 100, 105])
    assert (tail.at(some) == keys[some]).all()
    tail.prepend(keys[60:100])
    tail.prepend(keys[:60])
    assert (tail.between(0, len(keys)) == keys).all()
    assert 0 <= tail.nbytes() - len(keys) * 32 < max(4096, len(keys) * 32)
    tail.drop(len(keys))
    assert (tail.begin, tail.end, tail.nbytes()) == (len(keys), len(keys), 0)
    tail.append(keys[:5])
    assert (tail.at(np.array([len(keys) + 4])) == keys[4:5]).all()
