"""The twins of the primitives, on which every other simulated test stands, against NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from numba import cuda

from kvtierd.gpu.kernels.primitives import (
    bf16_pair,
    broadcast_f32,
    broadcast_u32,
    copy_async,
    copy_commit,
    copy_wait,
    e4m3_word,
    exchange_f32,
    exchange_u32,
    exp2,
    f16_of_e4m3,
    f16_pair,
    floats_of_bf16,
    floats_of_f16,
    ldmatrix,
    ldmatrix_transposed,
    load_pair,
    load_u8,
    load_u16,
    load_word,
    load_words,
    mma_bf16,
    mma_f16,
    set_shared_words,
    shared_bytes,
    shared_words,
    store_pair,
    store_u8,
    store_u16,
    store_word,
    store_words,
    sync_warp,
)
from kvtierd.gpu.kernels.registry import Kernel, cuda_is_simulated
from kvtierd.gpu.reference import codec as oracle

F32 = npt.NDArray[np.float32]


def _kernel(body: object, threads: int = 32) -> Kernel:
    return Kernel(name="test", function=body, signature="", threads=threads, registers={"*": 255}, reason="a test")  # type: ignore[arg-type]


def _bf16(values: F32) -> npt.NDArray[np.uint16]:
    """Values that bf16 holds exactly, as their upper halves."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def test_this_process_simulates() -> None:
    assert cuda_is_simulated()


def test_exchanges_and_broadcasts_go_between_lanes() -> None:
    def body(out: F32, words: npt.NDArray[np.uint32]) -> None:
        lane = cuda.threadIdx.x
        out[lane] = exchange_f32(np.float32(lane), 5) + broadcast_f32(np.float32(lane), 7) * np.float32(100)
        words[lane] = exchange_u32(lane, 16) + broadcast_u32(lane, 31) * 100

    out, words = np.zeros(64, np.float32), np.zeros(64, np.uint32)
    _kernel(body, 64).launch(1, out, words)
    lanes = np.arange(64)
    assert np.array_equal(out, (lanes ^ 5) + (lanes // 32 * 32 + 7) * 100)
    assert np.array_equal(words, (lanes ^ 16) + (lanes // 32 * 32 + 31) * 100)


def test_words_of_every_width_keep_their_place() -> None:
    def body(source: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
        a, b, c, d = load_words(source, 16)
        store_words(out, 0, b, a, d, c)
        e, f = load_pair(source, 8)
        store_pair(out, 16, f, e)
        store_word(out, 24, load_word(source, 4))
        store_u16(out, 28, load_u16(source, 2) | 0xFFFF0000)
        store_u8(out, 30, load_u8(source, 9) | 0xFFFFFF00)

    source, out = np.arange(32, dtype=np.uint8), np.zeros(32, np.uint8)
    _kernel(body, 1).launch(1, source, out)
    words = source.view(np.uint32)
    assert out.view(np.uint32).tolist() == [*words[[5, 4, 7, 6]], *words[[3, 2]], words[1], 0x00090302]


@pytest.mark.parametrize("byte", [-16, 8, 32])
def test_an_access_past_the_array_or_off_its_alignment_is_an_error(byte: int) -> None:
    def body(source: npt.NDArray[np.uint8]) -> None:
        load_words(source, byte)

    with pytest.raises(IndexError, match=f"16 bytes at {byte}"):
        _kernel(body, 1).launch(1, np.zeros(32, np.uint8))


def test_an_asynchronous_copy_lands_when_it_is_waited_for_and_fills_up_with_zero() -> None:
    def body(source: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
        stage = shared_bytes(32)
        copy_async(stage, 0, source, 16, 16)
        copy_commit()
        copy_async(stage, 16, source, 0, 5)
        copy_commit()
        copy_wait(1)
        for at in range(32):
            out[at] = stage[at]
        copy_wait(0)
        for at in range(32):
            out[32 + at] = stage[at]

    source, out = np.arange(1, 33, dtype=np.uint8), np.zeros(64, np.uint8)
    _kernel(body, 1).launch(1, source, out)
    assert np.array_equal(out[:16], source[16:])
    assert not np.array_equal(out[16:21], source[:5])
    assert out[32:].tolist() == [*source[16:], *source[:5], *[0] * 11]


def test_shared_memory_is_one_for_the_block_and_apart_by_line() -> None:
    def body(out: npt.NDArray[np.uint32]) -> None:
        one = shared_bytes(64)
        two = shared_bytes(64)
        at = 16 * cuda.threadIdx.x
        set_shared_words(one, at, at, 1, 2, 3)
        set_shared_words(two, at, 7, 7, 7, 7)
        sync_warp()
        out[cuda.threadIdx.x] = shared_words(one, 48 - at)[0]

    out = np.zeros(4, np.uint32)
    _kernel(body, 4).launch(1, out)
    assert out.tolist() == [48, 32, 16, 0]


def test_pairs_of_floats_round_to_nearest_even() -> None:
    def body(values: F32, words: npt.NDArray[np.uint32], back: F32) -> None:
        words[0] = bf16_pair(values[0], values[1])
        words[1] = f16_pair(values[0], values[1])
        back[0], back[1] = floats_of_bf16(words[0])
        back[2], back[3] = floats_of_f16(words[1])
        back[4] = exp2(values[2])

    values = np.array([1 + 2.0**-8, -(1 + 3 * 2.0**-8), -2.5], np.float32)
    words, back = np.zeros(2, np.uint32), np.zeros(5, np.float32)
    _kernel(body, 1).launch(1, values, words, back)
    assert back.tolist()[:4] == [1.0, -(1 + 2.0**-6), 1 + 2.0**-8, -(1 + 3 * 2.0**-8)]
    assert back[4] == np.float32(2**-2.5)


@pytest.mark.parametrize("half", ["bf16", "f16"])
def test_a_product_of_matrices_through_ldmatrix_and_mma(half: str) -> None:
    """C = A B with A [16, 16] and B [16, 8], both row by row in shared memory, as an attention kernel loads them."""

    def body(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8], out: F32) -> None:
        left, lane = shared_bytes(512), cuda.threadIdx.x
        right = shared_bytes(256)
        set_shared_words(left, 16 * lane, *load_words(a, 16 * lane))
        if lane < 16:
            set_shared_words(right, 16 * lane, *load_words(b, 16 * lane))
        sync_warp()
        # Matrices 0 to 3 of A: upper left, lower left, upper right, lower right.
        fragment = ldmatrix(left, (lane % 16) * 32 + lane // 16 * 16)
        columns = ldmatrix_transposed(right, lane % 16 * 16)
        zero = (np.float32(0), np.float32(0), np.float32(0), np.float32(0))
        multiply = mma_bf16 if half == "bf16" else mma_f16
        c = multiply(fragment, (columns[0], columns[1]), zero)
        row, column = lane // 4, lane % 4 * 2
        out[row, column], out[row, column + 1] = c[0], c[1]
        out[row + 8, column], out[row + 8, column + 1] = c[2], c[3]

    rng = np.random.default_rng(5)
    a = rng.integers(-8, 8, (16, 16)).astype(np.float32)
    b = rng.integers(-8, 8, (16, 8)).astype(np.float32)
    bits = _bf16 if half == "bf16" else (lambda values: values.astype(np.float16).view(np.uint16))
    out = np.full((16, 8), np.nan, np.float32)
    _kernel(body).launch(1, bits(a).reshape(-1).view(np.uint8), bits(b).reshape(-1).view(np.uint8), out)
    assert np.array_equal(out, a @ b)


def test_every_float_and_code_of_8_bits_is_converted_as_defined() -> None:
    def body(values: F32, codes: npt.NDArray[np.uint32], halves: npt.NDArray[np.uint32]) -> None:
        for at in range(0, values.size, 4):
            codes[at // 4] = e4m3_word(values[at], values[at + 1], values[at + 2], values[at + 3])
        for at in range(64):
            first = 4 * at
            word = first | first + 1 << 8 | first + 2 << 16 | first + 3 << 24
            halves[2 * at], halves[2 * at + 1] = f16_of_e4m3(word)

    every = (np.arange(65536, dtype=np.uint32)[::7] << 16).view(np.float32)[:9360]
    values = np.concatenate([every, [0.0, -0.0, 464.0, np.inf, -np.nan, 2.0**-10, 3 * 2.0**-10, -1.0625]])
    values = values.astype(np.float32)
    codes, halves = np.zeros(values.size // 4, np.uint32), np.zeros(128, np.uint32)
    _kernel(body, 1).launch(1, values, codes, halves)
    assert np.array_equal(codes.view(np.uint8), oracle.codes_of(values.astype(np.float64)))
    floats = halves.view(np.float16).astype(np.float64)
    np.testing.assert_array_equal(floats, oracle.values_of(np.arange(256, dtype=np.uint8)))
