"""One element: every 16-bit float and every code, against what torch makes of them (e4m3_golden.bin)."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvtierd.gpu.host_kernels import codec as kernels
from kvtierd.gpu.host_kernels import codec_decode
from kvtierd.gpu.host_kernels.codec_form import Form, Part
from kvtierd.gpu.host_kernels.e4m3 import e4m3_values

Array = npt.NDArray[np.generic]
_FILE = Path(__file__).with_name("e4m3_golden.bin")
_ENCODERS = {"bf16": kernels.encode_bf16, "fp16": kernels.encode_fp16, "fp32": kernels.encode_fp32}
_DECODERS = {"bf16": codec_decode.decode_bf16, "fp16": codec_decode.decode_fp16, "fp32": codec_decode.decode_fp32}
_ALL = np.arange(65536, dtype=np.uint16)


@pytest.fixture(scope="module")
def golden() -> dict[str, Array]:
    """The tables by name: `codes-KIND` uint8 [65536], `values-KIND` [256]."""
    data = zlib.decompress(_FILE.read_bytes())
    layout = (("codes-bf16", "u1", 65536), ("codes-fp16", "u1", 65536), ("values-bf16", "<u2", 256))
    layout += (("values-fp16", "<u2", 256), ("values-fp32", "<u4", 256))
    found, at = {}, 0
    for name, dtype, count in layout:
        found[name] = np.frombuffer(data, dtype, count, at)
        at += found[name].nbytes
    assert at == len(data)
    return found


def one_group(count: int) -> tuple[Form, Part, Part]:
    """A layer of one group of so many elements in one run, with room for its scale behind them."""
    scales = -(-count // 64) * 16
    form = Form(count, count, 4 * scales + 64, count, scales, 1)
    return form, Part(0, count, 0, 1, 1, count, 0, 0, count, 1), Part(count, 0, 0, 1, 0, 0, 0, 0, 0, 1)


def encoded(kind: str, elements: Array, exponent: int = 0) -> tuple[Array, npt.NDArray[np.float32]]:
    """Codes of one group with a given scale, and (scale, relative L2, largest error)."""
    form, k, v = one_group(elements.size)
    target = np.full(form.code_stride, 0xEE, np.uint8)
    past_caches = False
    _ENCODERS[kind](elements, target, target.view(np.float32), 0, 1, form, k, v, exponent, past_caches)
    return target[: elements.size], target.view(np.float32)[form.scales : form.scales + 3]


def decoded(kind: str, codes: Array, scale: float = 1.0) -> Array:
    form, k, v = one_group(codes.size)
    source = np.zeros(form.code_stride, np.uint8)
    source[: codes.size] = codes
    source.view(np.float32)[form.scales] = scale
    out = np.zeros(codes.size, np.uint32 if kind == "fp32" else np.uint16)
    _DECODERS[kind](source, source.view(np.float32), out, 0, 1, form, k, v)
    return out


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_every_16_bit_float_gets_the_code_that_torch_gives_it(golden: dict[str, Array], kind: str) -> None:
    codes, _ = encoded(kind, _ALL)
    assert np.array_equal(codes, golden[f"codes-{kind}"])


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_the_vectors_that_take_only_plain_values_give_the_same_codes(golden: dict[str, Array], kind: str) -> None:
    """Groups without NaN and Inf that need no saturation go another way through the kernel."""
    infinity = 0x7F80 if kind == "bf16" else 0x7C00
    top = 0x43E0 if kind == "bf16" else 0x5F00  # 448
    size = _ALL & 0x7FFF
    plain = _ALL[(size < infinity) & (size <= top)]
    codes, _ = encoded(kind, plain)
    assert plain.size > 30000
    assert np.array_equal(codes, golden[f"codes-{kind}"][plain])


def test_every_bf16_as_fp32_gets_the_same_code(golden: dict[str, Array]) -> None:
    codes, _ = encoded("fp32", _ALL.astype(np.uint32) << 16)
    assert np.array_equal(codes, golden["codes-bf16"])


def test_fp32_between_two_codes_rounds_to_nearest_even() -> None:
    middle = np.array([1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, 464.0, -1.0625], np.float32)
    above, below = np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)
    codes, _ = encoded("fp32", np.concatenate([middle, above, below]).astype(np.float32).view(np.uint32))
    assert codes.tolist() == [
        *[0x38, 0x3A, 0x00, 0x02, 0x7E, 0xB8],
        *[0x39, 0x3A, 0x01, 0x02, 0x7E, 0xB8],
        *[0x38, 0x39, 0x00, 0x01, 0x7E, 0xB9],
    ]


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("repeats", [1, 2])
def test_every_code_has_the_value_that_torch_gives_it(golden: dict[str, Array], kind: str, repeats: int) -> None:
    """Once as long as whole vectors, once with a tail behind them that is decoded one by one."""
    codes = np.tile(np.arange(256, dtype=np.uint8), repeats)[: 256 * repeats - 5 * (repeats - 1)]
    assert np.array_equal(decoded(kind, codes), golden[f"values-{kind}"][codes])


def test_a_value_beyond_the_range_decodes_to_the_largest_finite_one() -> None:
    codes = np.array([0x7E, 0xFE, 0x78], np.uint8)
    assert decoded("fp16", codes, 256.0).tolist() == [0x7BFF, 0xFBFF, 0x7BFF]
    assert decoded("bf16", codes, 2.0**120).tolist() == [0x7F7F, 0xFF7F, 0x7F7F]
    assert decoded("fp32", codes, 2.0**120).tolist() == [0x7F7FFFFF, 0xFF7FFFFF, 0x7F7FFFFF]


def test_a_scale_that_is_no_power_of_two_decodes_to_the_nearest_value() -> None:
    codes = np.arange(0x7F, dtype=np.uint8)
    values = e4m3_values()[codes] * np.float32(0.3)
    assert np.array_equal(decoded("fp32", codes, 0.3).view(np.float32), values)
    assert np.array_equal(decoded("fp16", codes, 0.3).view(np.float16), values.astype(np.float16))
