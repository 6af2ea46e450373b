"""The codec against torch itself: the committed golden tables are torch's, and so are the codes of many float32."""

from __future__ import annotations

import importlib.util
import zlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from kvtierd.gpu.host_kernels import codec as kernels

pytestmark = pytest.mark.engines
_FOLDER = Path(__file__).resolve().parents[2] / "unit/gpu"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_e4m3_golden", _FOLDER / "make_e4m3_golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_golden_tables_are_what_torch_says_now(generator: ModuleType) -> None:
    assert zlib.decompress(generator.FILE.read_bytes()) == b"".join(generator.tables())


def test_scaled_codes_and_values_of_float32_are_torchs() -> None:
    values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(7))
    codes, out = np.zeros(values.numel(), np.uint8), np.zeros(3, np.float32)
    bits = values.numpy().view(np.uint32)
    shape = (1, 1, values.numel(), 0, 0)
    kernels.encode_fp32(bits, codes, out[:1], out[1:2], out[2:], *shape, kernels.CHOOSE)
    scale = float(out[0])
    assert scale == 2.0**-6
    wanted = (values / scale).to(torch.float8_e4m3fn)
    assert np.array_equal(codes, wanted.view(torch.uint8).numpy())
    back = np.zeros(codes.size, np.uint16)
    kernels.decode_bf16(codes, back, out[:1], *shape)
    assert np.array_equal(back, (wanted.to(torch.float32) * scale).to(torch.bfloat16).view(torch.uint16).numpy())
    error = values - wanted.to(torch.float32) * scale
    np.testing.assert_allclose(out[1], (error.norm() / values.norm()).item(), rtol=1e-4)
    np.testing.assert_allclose(out[2], (error.abs().max() / values.abs().max()).item(), rtol=1e-6)
