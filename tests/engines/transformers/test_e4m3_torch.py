"""The codec against torch itself: the committed golden tables are torch's, and so are the codes of many float32."""

from __future__ import annotations

import importlib.util
import zlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from kvtierd.core.geometry import Geometry
from kvtierd.gpu.codec import BlockCodec

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
    shape = {"block_size": 1 << 10, "layers": 1, "kv_heads": 1, "k_dim": 1 << 10, "v_dim": 0}
    codec, bf16 = BlockCodec(Geometry(**shape, dtype="fp32")), BlockCodec(Geometry(**shape))
    encoded, back = np.zeros(codec.layout.slot_bytes, np.uint8), np.zeros(values.numel() * 2, np.uint8)
    codec.encode(values.numpy().view(np.uint8), encoded)
    scale = float(codec.scales(encoded)[0, 0])
    assert scale == 2.0**-6
    wanted = (values / scale).to(torch.float8_e4m3fn)
    assert np.array_equal(encoded[: values.numel()], wanted.view(torch.uint8).numpy())
    bf16.decode(encoded, back)
    expected = (wanted.to(torch.float32) * scale).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(back.view(np.uint16), expected)
    out = [scale, codec.relative_l2(encoded)[0, 0], codec.largest_error(encoded)[0, 0]]
    error = values - wanted.to(torch.float32) * scale
    np.testing.assert_allclose(out[1], (error.norm() / values.norm()).item(), rtol=1e-4)
    np.testing.assert_allclose(out[2], (error.abs().max() / values.abs().max()).item(), rtol=1e-6)
