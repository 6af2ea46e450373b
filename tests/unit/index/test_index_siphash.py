from __future__ import annotations

import numpy as np
from numba import types

from kvtierd.index.jit import compiled
from kvtierd.index.layout import BUCKETS_AT, KEYS, U64, WORDS, buckets_of, hash_key, tag_of

SECRET = bytes(range(16))


@compiled(types.uint64(WORDS, KEYS, types.int64, types.int64))
def hash_at(table, keys, at, namespace):
    return hash_key(table, keys, U64(at), U64(namespace))


@compiled(types.UniTuple(types.uint64, 3)(types.uint64, types.int64, types.int64))
def derived(hashed, buckets, mask):
    first, second = buckets_of(hashed, U64(buckets), U64(mask))
    return tag_of(hashed), first, second


def secret_table():
    table = np.zeros((1, 8), np.uint64)
    table[0, :2] = np.frombuffer(SECRET, "<u8")
    return table


def test_the_reference_gives_the_published_vectors(reference_siphash):
    # The first three of the table of SipHash-2-4 for the key 00..0f in its authors' reference implementation.
    published = [0x726FDB47DD0E0E31, 0x74F839C593DC67FD, 0x0D6C8009D9A94F5A]
    assert [reference_siphash(SECRET, bytes(range(n)), 2, 4) for n in range(3)] == published


def test_the_compiled_hash_is_siphash_1_3_of_key_and_namespace(reference_siphash, random_keys):
    for key, namespace in zip(random_keys(50), [0, 1, 255, 256, 65534] * 10, strict=True):
        wanted = reference_siphash(SECRET, key.tobytes() + namespace.to_bytes(2, "little"), 1, 3)
        assert hash_at(secret_table(), key.reshape(1, 32), 0, namespace) == wanted


def test_keys_are_read_at_any_address(random_keys):
    frame = np.concatenate([np.zeros(3, np.uint8), random_keys(4).ravel()])
    unaligned = frame[3:].reshape(4, 32)
    unaligned.flags.writeable = False
    assert hash_at(secret_table(), unaligned, 64, 9) == hash_at(secret_table(), unaligned.copy(), 64, 9)


def test_a_tag_is_never_the_empty_one():
    assert derived(0, 16, 15)[0] == 1
    assert derived(0xAB00_0000_CD00_0000, 16, 15)[0] == 0xABCD


def test_buckets_follow_linear_hashing():
    for buckets in range(16, 65):
        mask = (1 << (buckets.bit_length() - 1)) - 1
        for choice in range(128):
            wide = choice % (2 * (mask + 1))
            index = wide if wide < buckets else wide % (mask + 1)
            assert (derived(choice, buckets, mask)[1] - BUCKETS_AT) // 64 == index
