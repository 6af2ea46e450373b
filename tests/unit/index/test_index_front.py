from __future__ import annotations

import numpy as np
import pytest

from kvtierd.index import front as front_module
from kvtierd.index.block_table import BlockTable
from kvtierd.index.crossover import MEASURED, Account, Costs, Scheme
from kvtierd.index.front import AdaptiveFront
from kvtierd.index.page_table import PageTable
from kvtierd.index.sequence import POSITIONS_MAX

CHEAP = Costs(probe_ns=1, track_ns=1, begin_ns=10, update_ns=2, positions_min=100)


class World:
    """A front with blocks of one namespace: `put` and `drop` by key, and what must be true of a sequence."""

    def __init__(self, capacity=8000, **options):
        self.blocks = BlockTable(capacity)
        self.pages = PageTable(self.blocks)
        self.front = AdaptiveFront(self.blocks, self.pages, **options)

    def put(self, keys, namespace=1):
        rows = self.blocks.alloc(len(keys))
        self.blocks.key[rows], self.blocks.namespace[rows] = keys, namespace
        assert (self.front.insert(rows) == -1).all()
        return rows

    def drop(self, rows):
        assert self.front.delete(rows) == len(rows)
        self.blocks.free(rows)

    def settle(self):
        while self.front.step(1000):
            pass

    def check(self, number, keys, namespace=1):
        """Every answer about a sequence against the page table itself."""
        rows = self.pages.lookup(keys, namespace)
        length, middle = len(keys), len(keys) // 2
        assert (self.front.rows(number, np.arange(length)) == rows).all()
        assert self.front.count(number) == (rows >= 0).sum()
        assert self.front.count(number, middle // 2, middle) == (rows[middle // 2 : middle] >= 0).sum()
        assert self.front.holes(number, middle).tolist() == (np.flatnonzero(rows[middle:] < 0) + middle).tolist()
        for start in (0, middle):
            assert self.front.run(number, start) == np.append(rows[start:], -1).argmin()
        found = self.front.extents(number, 0, length * 64)
        present = np.flatnonzero(rows >= 0)
        assert found.tolist() == [[64 * at, 64, rows[at], 0] for at in present.tolist()]


@pytest.mark.parametrize("there", [Scheme.BITMAP, Scheme.HYBRID])
def test_answers_are_right_between_every_step_of_a_switch_and_back(random_keys, rng, there):
    world = World(positions_per_call=0)
    keys = random_keys(700)
    rows = world.put(keys[rng.random(700) < 0.7])
    number = world.front.open(1, 64, keys)
    for scheme in (there, Scheme.BITMAP, Scheme.CUCKOO):
        world.front.want(number, scheme)
        more = True
        while more:
            more = world.front.step(37)
            gone, rows = rows[:2], rows[2:]
            world.drop(gone)
            rows = np.concatenate([rows, world.put(random_keys(1))])
            world.check(number, keys)
        assert world.front.scheme(number) is scheme


def test_blocks_that_come_and_go_are_seen_in_every_sequence_that_shares_them(random_keys):
    world = World()
    shared, ends = random_keys(200), [random_keys(50) for _ in range(3)]
    sequences = {world.front.open(1, 64, keys): keys for keys in (np.concatenate([shared, end]) for end in ends)}
    for number, scheme in zip(sequences, Scheme, strict=True):
        world.front.want(number, scheme)
    world.settle()
    rows = world.put(shared)
    assert [world.front.run(number) for number in sequences] == [200] * 3
    world.drop(rows[100:])
    world.put(ends[1])
    for number, keys in sequences.items():
        world.check(number, keys)


def test_another_namespaces_block_is_not_in_the_sequence(random_keys):
    world = World()
    keys = random_keys(100)
    number = world.front.open(1, 64, keys)
    world.front.want(number, Scheme.BITMAP)
    world.settle()
    rows = world.put(keys, namespace=2)
    assert world.front.count(number) == 0
    world.put(keys)
    world.drop(rows)
    assert world.front.count(number) == 100


def test_a_call_moves_no_more_than_its_share(random_keys):
    world = World(positions_per_call=16)
    keys = random_keys(500)
    number = world.front.open(1, 64, keys)
    moved = [world.front.stats()["positions_watched"]]
    world.front.want(number, Scheme.BITMAP)
    while moved[-1] < 500:
        moved.append(world.front.stats()["positions_watched"])
        world.front.count(number)
    assert (np.diff(moved) <= 16).all()
    world.front.close(number)
    assert world.front.stats()["positions_watched"] == 484
    world.settle()
    assert world.front.stats() == {
        "sequences": 0,
        "sequences_moving": 0,
        "sequences_waiting": 0,
        "switches_to_bitmap": 0,
        "switches_to_cuckoo": 0,
        "positions_watched": 0,
    }


def test_what_is_asked_often_is_tracked_and_what_changes_often_is_not(random_keys):
    world = World(costs=CHEAP)
    keys = random_keys(200)
    rows = world.put(keys)
    number = world.front.open(1, 64, keys)
    assert world.front.count(number) == 200  # 200 saved, 210 wanted.
    assert world.front.stats()["switches_to_bitmap"] == 0
    world.front.count(number, 0, 10)
    world.settle()
    assert world.front.scheme(number) is Scheme.BITMAP
    world.drop(rows[:100])
    assert world.front.stats()["switches_to_cuckoo"] == 0
    world.put(keys[:100])
    world.settle()
    assert world.front.scheme(number) is Scheme.CUCKOO
    assert world.front.stats()["switches_to_cuckoo"] == 1
    world.check(number, keys)


def test_short_sequences_are_not_tracked_however_often_they_are_asked_about(random_keys):
    world = World(costs=CHEAP)
    number = world.front.open(1, 64, random_keys(99))
    for _ in range(100):
        world.front.count(number)
    assert world.front.stats()["switches_to_bitmap"] == 0


def test_a_namespace_whose_sequences_were_worth_it_has_the_next_tracked_at_once(random_keys):
    world = World(costs=CHEAP)
    first = world.front.open(1, 64, random_keys(200))
    world.front.count(first)
    world.front.count(first)
    second, other = world.front.open(1, 64, random_keys(150)), world.front.open(2, 64, random_keys(150))
    world.settle()
    assert world.front.scheme(second) is Scheme.BITMAP
    assert world.front.scheme(other) is Scheme.CUCKOO
    world.front.close(second)  # It was never asked about.
    third = world.front.open(1, 64, random_keys(150))
    world.settle()
    assert world.front.scheme(third) is Scheme.CUCKOO


def test_a_full_watch_leaves_the_rest_to_the_page_table_until_there_is_room(random_keys):
    world = World(watched_max=300)
    keys = [random_keys(200), random_keys(200)]
    rows = [world.put(part) for part in keys]
    numbers = [world.front.open(1, 64, part) for part in keys]
    for number in numbers:
        world.front.want(number, Scheme.BITMAP)
    world.settle()
    assert world.front.stats()["positions_watched"] == 300
    assert world.front.stats()["sequences_waiting"] == 1
    world.drop(rows[1][50:150])
    for number, part in zip(numbers, keys, strict=True):
        world.check(number, part)
    world.front.close(numbers[0])
    world.settle()
    assert world.front.scheme(numbers[1]) is Scheme.BITMAP
    world.check(numbers[1], keys[1])


def test_what_a_reader_was_given_outlives_switch_split_and_merge(random_keys):
    world = World()
    keys = random_keys(100)
    rows = world.put(keys)
    number = world.front.open(1, 128, keys)
    world.front.want(number, Scheme.BITMAP)
    world.settle()
    given = [world.front.rows(number, np.arange(100)), world.front.extents(number, 0, 12_800)]
    copies = [answer.copy() for answer in given]
    world.front.want(number, Scheme.HYBRID)
    world.settle()
    assert world.front.split(number, 5 * 128, np.array([64, 64]))
    assert world.front.merge(number, 640, 896, 7000)
    world.drop(rows[50:])
    for answer, copy in zip(given, copies, strict=True):
        assert (answer == copy).all()


def test_split_and_merge_wait_until_the_hybrid_index_has_the_tokens(random_keys):
    world = World(positions_per_call=0)
    keys = random_keys(10)
    rows = world.put(keys)
    number = world.front.open(1, 256, keys)
    assert not world.front.split(number, 300, np.array([64, 192]))
    assert not world.front.merge(number, 0, 512, 5000)
    world.settle()
    assert world.front.split(number, 300, np.array([64, 192]))
    assert world.front.extents(number, 256, 512).tolist() == [[256, 64, rows[1], 0], [320, 192, rows[1], 64]]
    assert world.front.merge(number, 320, 768, 5000)
    assert world.front.extents(number, 511, 513).tolist() == [[320, 448, 5000, 0]]
    world.drop(rows[2:3])
    assert world.front.extents(number, 256, 1024).tolist() == [
        [256, 64, rows[1], 0],
        [320, 192, 5000, 0],
        [768, 256, rows[3], 0],
    ]
    with pytest.raises(ValueError, match="only a hybrid index knows"):
        world.front.want(number, Scheme.BITMAP)


def test_uses_of_parts_are_counted_once_there_is_a_hybrid_index(random_keys):
    world = World()
    number = world.front.open(1, 256, random_keys(4))
    world.front.touch(number, 0, 1024)
    assert world.front.uses(number, 300).size == 0
    world.front.want(number, Scheme.HYBRID)
    world.settle()
    world.front.touch(number, 300, 390)
    world.front.touch(number, 256, 1024)
    assert world.front.uses(number, 300).tolist() == [2, 2, 2, 1]


def test_sequences_grow_in_any_scheme_without_a_copy_of_all(random_keys):
    world = World()
    keys = random_keys(3000)
    world.put(keys[::2])
    numbers = [world.front.open(1, 64, keys[:0]) for _ in Scheme]
    for number, scheme in zip(numbers, Scheme, strict=True):
        world.front.want(number, scheme)
    for begin in range(0, 3000, 70):
        for number in numbers:
            world.front.append(number, keys[begin : begin + 70])
    world.settle()
    for number, scheme in zip(numbers, Scheme, strict=True):
        assert world.front.scheme(number) is scheme
        world.check(number, keys)
    assert 32 <= world.front.nbytes(numbers[0]) / 3000 < 34
    assert world.front.nbytes(numbers[1]) < world.front.nbytes(numbers[2]) < 3000 * 150


def test_what_makes_no_sense_is_named(random_keys, monkeypatch):
    world = World()
    front, keys = world.front, random_keys(10)
    world.put(keys[:8])
    number = front.open(1, 128, keys)
    odd = front.open(1, 48, keys)
    front.want(number, Scheme.HYBRID)
    for call, text in [
        (lambda: front.open(1, 0, keys), "block_tokens is 0"),
        (lambda: front.open(-1, 64, keys), "namespace number is -1"),
        (lambda: front.append(7, keys), "sequence 7 is not open"),
        (lambda: front.close(7), "sequence 7 is not open"),
        (lambda: front.rows(number, np.array([3, 10])), r"positions 3\.\.10 are not all in 0\.\.9"),
        (lambda: front.run(number, 11), r"not within 0\.\.10"),
        (lambda: front.count(number, 5, 4), r"positions 5\.\.4 are not within"),
        (lambda: front.holes(number, 0, 11), r"positions 0\.\.11 are not within"),
        (lambda: front.extents(number, 0, 1281), r"tokens 0\.\.1281 are not within 0\.\.1280"),
        (lambda: front.want(odd, Scheme.HYBRID), "blocks of 48 tokens do not fit"),
        (lambda: front.split(odd, 0, np.array([48])), "blocks of 48 tokens do not fit"),
        (lambda: front.split(number, 1280, np.array([64, 64])), r"tokens 1280\.\.1281"),
        (lambda: front.split(number, 0, np.array([64, 128])), "parts of 192 tokens do not make the 128"),
        (lambda: front.split(number, 1100, np.array([64, 64])), "not all in present blocks"),
        (lambda: front.merge(number, 0, 0, 1), r"tokens 0\.\.0 of sequence 0 are none"),
        (lambda: front.merge(number, 0, 256, -1), "place is -1"),
        (lambda: front.merge(number, 64, 256, 1), "no extents of sequence 0 begin at token 64"),
        (lambda: front.merge(number, 0, 192, 1), "begin at token 0 and end at 192"),
        (lambda: front.merge(number, 896, 1152, 1), "not all in present blocks"),
        (lambda: front.merge(number, 0, 640, 1), "extent of 640 tokens"),
    ]:
        with pytest.raises(ValueError, match=text):
            call()
    assert front.extents(number, 0, 1280).tolist() == [[128 * at, 128, at, 0] for at in range(8)]
    monkeypatch.setattr(front_module, "SEQUENCES_MAX", 2)
    with pytest.raises(ValueError, match="2 sequences are open"):
        front.open(1, 64, keys)
    many = np.broadcast_to(keys[:1], (POSITIONS_MAX, 32))
    with pytest.raises(ValueError, match=f"{POSITIONS_MAX} blocks after 10 are over"):
        front.append(number, many)


def test_the_choice_costs_no_more_than_twice_the_better_of_the_two():
    """Questions only: tracking begins when probing has cost as much. Changes only: it ends likewise."""
    account, price_ns = Account(), MEASURED.price_ns(10_000)
    scheme, asked = Scheme.CUCKOO, 0
    while scheme is Scheme.CUCKOO:
        account.asked(1000, MEASURED)
        asked += 1
        scheme = account.choose(scheme, 10_000, MEASURED)
    assert price_ns <= asked * 1000 * MEASURED.probe_ns <= price_ns + 1000 * MEASURED.probe_ns
    for _ in range(10 * asked):
        account.asked(1000, MEASURED)
        scheme = account.choose(scheme, 10_000, MEASURED)
    changed = 0
    while scheme is Scheme.BITMAP:
        account.changed(32, MEASURED)
        changed += 32
        scheme = account.choose(scheme, 10_000, MEASURED)
    assert changed * MEASURED.update_ns <= 2 * price_ns + 32 * MEASURED.update_ns
