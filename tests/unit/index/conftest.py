"""Keys for the tests of the index, and SipHash in plain Python to check the compiled one against."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

Keys = npt.NDArray[np.uint8]
MASK = (1 << 64) - 1


def _rotate(value: int, by: int) -> int:
    return ((value << by) | (value >> (64 - by))) & MASK


def _sip_round(v: list[int]) -> None:
    v[0] = (v[0] + v[1]) & MASK
    v[1] = _rotate(v[1], 13) ^ v[0]
    v[0] = _rotate(v[0], 32)
    v[2] = (v[2] + v[3]) & MASK
    v[3] = _rotate(v[3], 16) ^ v[2]
    v[0] = (v[0] + v[3]) & MASK
    v[3] = _rotate(v[3], 21) ^ v[0]
    v[2] = (v[2] + v[1]) & MASK
    v[1] = _rotate(v[1], 17) ^ v[2]
    v[2] = _rotate(v[2], 32)


def siphash(secret: bytes, message: bytes, compress: int, finish: int) -> int:
    """SipHash-`compress`-`finish` of any message."""
    k0, k1 = (int.from_bytes(secret[i : i + 8], "little") for i in (0, 8))
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]
    padded = message + bytes(-(len(message) + 1) % 8) + bytes([len(message) & 0xFF])
    for at in range(0, len(padded), 8):
        word = int.from_bytes(padded[at : at + 8], "little")
        v[3] ^= word
        for _ in range(compress):
            _sip_round(v)
        v[0] ^= word
    v[2] ^= 0xFF
    for _ in range(finish):
        _sip_round(v)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


@pytest.fixture
def reference_siphash() -> Callable[[bytes, bytes, int, int], int]:
    return siphash


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def random_keys(rng: np.random.Generator) -> Callable[[int], Keys]:
    return lambda count: rng.integers(0, 256, (count, 32), dtype=np.uint8)


@pytest.fixture
def colliding_keys() -> Callable[[bytes, int, int], Keys]:
    """Keys of namespace 1 whose both choices are bucket 0 of 16: what somebody could make who knows the secret."""

    def make(secret: bytes, count: int, buckets: int) -> Keys:
        def attempts() -> Iterator[bytes]:
            for number in range(1 << 30):
                key = number.to_bytes(32, "little")
                hashed = siphash(secret, key + (1).to_bytes(2, "little"), 1, 3)
                if hashed % buckets == 0 and (hashed >> 32) % buckets == 0:
                    yield key

        found = b"".join(key for key, _ in zip(attempts(), range(count), strict=False))
        return np.frombuffer(found, np.uint8).reshape(-1, 32)

    return make
