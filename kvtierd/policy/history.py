"""Observations: blocks that a request used, and whether and when they were used again. Also what ghosts are for.

A ring of records, oldest overwritten, found by the first 64 bits of a block's key. Not every block of a request is
observed: its last two, the last of each run of one kind, the deepest one known before, and a sample that is chosen by
hash, so that the same blocks are chosen each time, and sparser the longer requests are. Since a prefix is used from its
head on, an observed block tells about those before it: how often they were used and since when.

An observation is *open* until its block is used again; then the age is counted in `returned`. One that is still open
when half of the ring has been filled after it is counted in `unreturned` with the age it has reached. Both counts are
halved after as many observations, so that what was long ago fades. The older half of the ring still remembers: a
conversation that comes back after its blocks were evicted goes on with its turn and its pace.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import from_dtype, types

from kvtierd.index.jit import Word, compiled, helper
from kvtierd.policy.ages import age_bin, bit_length, elapsed, relative_bin
from kvtierd.policy.kinds import is_relative, private_kind, shared_kind

RECORD = np.dtype(
    [
        ("key", "u8"),
        ("next", "i4"),  # in the chain of its hash, as place + 1
        ("at", "u4"),
        ("first", "u4"),  # when the block was first used, as far as is known
        ("pause", "u4"),  # usual pause between the turns of its conversation, in ticks
        ("count", "u4"),
        ("kind", "u2"),
        ("turn", "u2"),
        ("interval", "u1"),  # bin of the mean interval, for shared kinds
        ("after", "u1"),  # blocks after it in its request, at most 255
        ("state", "u1"),
        ("forked", "u1"),  # a request has already gone on from here with blocks of its own
        ("weight", "f4"),
    ]
)
assert RECORD.itemsize == 40

FREE, OPEN, CLOSED = 0, 1, 2

HEAD, FILLED, FRESH, AGED, REQUESTS, LENGTH, SECRET, OBSERVED, DUE = range(9)
STATE_WORDS = 9
"""Words of `state`: next place, records in use, observations since the last fit and since the last halving, requests,
their mean length in 256ths of a block, a secret number for the hash, observations until the last fit, and how many more
make a fit due."""

TURN, PAUSE, MATCHED, FORKED_AT, NEXT_TURN, NEXT_PAUSE = range(6)
STORY_WORDS = 6
"""Words of a request's story: its turn, the usual pause between turns, how many of its blocks were known before, the
index of the last observed one of those (-1: none), and what turn and pause are if it goes on from there: a request that
is told of again may have no blocks behind it the first time (NEXT_TURN is 0 where it cannot be the next turn)."""

CHAIN_MAX = 32
"""Records looked at in a chain: keys come from clients, and could be made to collide."""
SAMPLES = 10
"""Observed blocks a request by sampling, about."""
LONG_SAMPLES = 64
"""The same for a request much longer than the mean."""

U64 = np.uint64
Records = Any
"""Array of RECORD: in compiled code its elements have fields, which no type checker knows."""
Heads = npt.NDArray[np.int32]
Counts = npt.NDArray[np.float32]
State = npt.NDArray[np.int64]
Keys64 = npt.NDArray[np.uint64]

RECORDS_TYPE = types.Array(from_dtype(RECORD), 1, "C")
HEADS_TYPE = types.int32[::1]
COUNTS_TYPE = types.float32[:, ::1]
STATE_TYPE = types.int64[::1]


@helper
def _spread(key: Word, secret: Word) -> Word:
    value = (U64(key) ^ U64(secret)) * U64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> U64(29))) * U64(0xBF58476D1CE4E5B9)
    return value ^ (value >> U64(32))


@helper
def _bucket(heads: Heads, state: State, key: Word) -> Word:
    return np.int64(_spread(key, state[SECRET]) & U64(heads.size - 1))


@helper
def _find(heads: Heads, ring: Records, state: State, key: Word) -> Word:
    """Place of a key's record, or -1."""
    place = heads[_bucket(heads, state, key)] - 1
    for _ in range(CHAIN_MAX):
        if place < 0 or ring[place].key == key:
            return place
        place = ring[place].next - 1
    return -1


@helper
def _unchain(heads: Heads, ring: Records, state: State, place: Word) -> None:
    """Take a record out of its chain; it cannot be found any more."""
    bucket = _bucket(heads, state, ring[place].key)
    link = heads[bucket] - 1
    if link == place:
        heads[bucket] = ring[place].next
        return
    while link >= 0:
        following = ring[link].next - 1
        if following == place:
            ring[link].next = ring[place].next
            return
        link = following


@helper
def _count_age(counts: Counts, record: Any, now: Word) -> None:
    age = elapsed(record.at, now)
    if is_relative(record.kind):
        counts[record.kind, relative_bin(age, record.interval)] += record.weight
    else:
        counts[record.kind, age_bin(age)] += record.weight


@helper
def _recent(ring: Records, state: State, place: Word) -> Word:
    """Whether a record is in the newer half of the ring."""
    behind = (state[HEAD] - place) % ring.size
    return 0 < behind <= ring.size // 2


@helper
def _close(ring: Records, returned: Counts, state: State, place: Word, now: Word) -> None:
    """Its block was used again."""
    if ring[place].state == OPEN and _recent(ring, state, place):
        _count_age(returned, ring[place], now)
    ring[place].state = CLOSED


@helper
def _turn_over(heads: Heads, ring: Records, returned: Counts, unreturned: Counts, state: State, now: Word) -> Word:
    """Make place for a record: the oldest goes, and one leaves the newer half. Returns the place."""
    half = ring.size // 2
    place = state[HEAD]
    if state[FILLED] >= half:
        leaving = (place - half) % ring.size
        if ring[leaving].state == OPEN:
            _count_age(unreturned, ring[leaving], now)
        state[AGED] += 1
        if state[AGED] >= half:
            returned *= np.float32(0.5)
            unreturned *= np.float32(0.5)
            state[AGED] = 0
    if state[FILLED] == ring.size:
        if ring[place].state != FREE:
            _unchain(heads, ring, state, place)
    else:
        state[FILLED] += 1
    state[HEAD] = (place + 1) % ring.size
    state[FRESH] += 1
    return place


@helper
def _sample_mask(state: State, length: Word) -> Word:
    """Bits of the hash that must be zero for a block to be observed."""
    state[REQUESTS] += 1
    state[LENGTH] += (length * 256 - state[LENGTH]) // min(state[REQUESTS], 256)
    spare = max(state[LENGTH] // (256 * SAMPLES), length // LONG_SAMPLES)
    return U64((1 << (bit_length(max(1, spare)) - 1)) - 1)


@helper
def _recall(
    heads: Heads, ring: Records, returned: Counts, state: State, keys: Word, now: Word, began: Word, story: Word,
    counts: Word, firsts: Word,
) -> None:  # fmt: skip
    """Look a request's blocks up from its tail: close their observations, and tell the story of the request.

    `counts` and `firsts` get how often each block has been used, this time included, and since when. Observations of
    the same request, made at tick `began` (or -1), are no return.
    """
    known, count, first = False, 1, now
    for index in range(keys.size - 1, -1, -1):
        place = _find(heads, ring, state, keys[index])
        if place >= 0:
            record = ring[place]
            same = began >= 0 and record.at == began
            if not known and not same and index > story[FORKED_AT]:
                pause = elapsed(record.at, now)
                story[MATCHED], story[FORKED_AT], story[NEXT_TURN] = index + 1, index, 0
                if record.after <= 1 and not record.forked:
                    story[NEXT_TURN] = record.turn + 1
                    story[NEXT_PAUSE] = pause if record.turn == 0 else (np.int64(record.pause) + pause) // 2
            known = True
            if record.count + (not same) > count:
                count, first = record.count + (not same), record.first
            if same:
                record.state = CLOSED
            else:
                _close(ring, returned, state, place, now)
        counts[index], firsts[index] = count, first
    if story[FORKED_AT] + 1 < keys.size:
        story[TURN], story[PAUSE] = story[NEXT_TURN], story[NEXT_PAUSE]


@helper
def _kinds_of(keys: Word, now: Word, story: Word, counts: Word, firsts: Word, kinds: Word, paces: Word) -> None:
    turn, length = story[TURN], keys.size
    added = length - min(length, story[MATCHED])
    pause_bin = age_bin(story[PAUSE]) if turn > 0 else 0
    for index in range(length):
        paces[index] = 0
        if counts[index] > turn + 1:
            paces[index] = age_bin(elapsed(firsts[index], now) // (counts[index] - 1))
            kinds[index] = shared_kind(counts[index], paces[index])
        else:
            kinds[index] = private_kind(turn, added, np.int64(index == length - 1), pause_bin)


@helper
def _choose(state: State, keys: Word, story: Word, kinds: Word, weights: Word) -> None:
    """Choose the blocks to observe: each gets a weight, the others keep 0."""
    length = keys.size
    mask = _sample_mask(state, length)
    begin = count = 0
    for index in range(length):
        last_of_kind = index == length - 1 or kinds[index] != kinds[index + 1]
        if (
            last_of_kind
            or index == length - 2
            or index == story[FORKED_AT]
            or ((_spread(keys[index], state[SECRET]) >> U64(40)) & mask) == 0
        ):
            weights[index] = 1.0
            count += 1
        if last_of_kind:
            weights[begin : index + 1] /= np.float32(np.sqrt(count))
            begin, count = index + 1, 0


@helper
def _fill(record: Any, key: Word, now: Word, story: Word, count: Word, first: Word, kind: Word, pace: Word) -> None:
    record.key, record.at, record.first = key, now, first
    record.pause, record.turn = story[PAUSE], min(story[TURN], 65535)
    record.count, record.kind, record.interval = count, kind, pace
    record.state = OPEN


@compiled(
    types.void(
        HEADS_TYPE, RECORDS_TYPE, COUNTS_TYPE, COUNTS_TYPE, STATE_TYPE, types.uint64[::1], types.uint32, types.int64,
        types.int64, types.int64[::1], types.uint16[::1], types.uint8[::1],
    )
)  # fmt: skip
def observe(
    heads: Heads, ring: Records, returned: Counts, unreturned: Counts, state: State, keys: Keys64, now: int, hits: int,
    began: int, story: State, kinds: npt.NDArray[np.uint16], paces: npt.NDArray[np.uint8],
) -> None:  # fmt: skip
    """Take note of a request for the blocks `keys`, in prefix order, and say of what kind each is now.

    `hits` leading blocks were found in the cache. A request that is told of again, with more blocks, passes the tick
    and the story of the first time as `began` and `story`; else `began` is -1 and `story` zeros, which are filled in.
    Written are `kinds` [n] uint16 and `paces` [n] uint8, the bin of a shared block's mean interval.
    """
    length = keys.size
    counts, firsts = np.empty(length, np.int64), np.empty(length, np.uint32)
    if began < 0:
        story[FORKED_AT] = -1
    _recall(heads, ring, returned, state, keys, now, began, story, counts, firsts)
    story[MATCHED] = max(story[MATCHED], hits if began < 0 else 0)
    _kinds_of(keys, now, story, counts, firsts, kinds, paces)
    weights = np.zeros(length, np.float32)
    _choose(state, keys, story, kinds, weights)
    for index in range(length):
        place = _find(heads, ring, state, keys[index])
        forked = np.uint8(0)
        if place >= 0:
            forked = ring[place].forked
            if weights[index] == 0 or began < 0 or ring[place].at != began:
                _unchain(heads, ring, state, place)
                ring[place].state = FREE
                place = -1
        if weights[index] == 0:
            continue
        if place < 0:
            place = _turn_over(heads, ring, returned, unreturned, state, now)
            bucket = _bucket(heads, state, keys[index])
            ring[place].next = heads[bucket]
            heads[bucket] = place + 1
        record = ring[place]
        _fill(record, keys[index], now, story, counts[index], firsts[index], kinds[index], paces[index])
        record.after, record.weight = min(255, length - 1 - index), weights[index]
        record.forked = 1 if index == story[FORKED_AT] and index < length - 1 else forked
