"""Writes e4m3_golden.bin: what torch makes of every 16-bit float and of every code. Needs torch; its command is

    .venv-engines-transformers/bin/python tests/unit/gpu/make_e4m3_golden.py

The file is zlib over, in this order: codes of all 65,536 bf16, codes of all 65,536 fp16 (one byte each, by the bits of
the input), then all 256 codes as bf16, fp16 (two bytes each, little-endian) and fp32 (four).
"""

from __future__ import annotations

import zlib
from pathlib import Path

import torch

FILE = Path(__file__).with_name("e4m3_golden.bin")


def tables() -> list[bytes]:
    """The tables, in the order of the file."""
    inputs = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    encoded = [inputs.view(kind).to(torch.float8_e4m3fn).view(torch.uint8) for kind in (torch.bfloat16, torch.float16)]
    decoded = [codes.to(kind).view(torch.uint8) for kind in (torch.bfloat16, torch.float16, torch.float32)]
    return [table.numpy().tobytes() for table in (*encoded, *decoded)]


if __name__ == "__main__":
    FILE.write_bytes(zlib.compress(b"".join(tables()), 9))
