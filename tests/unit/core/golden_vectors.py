"""Make protocol/golden.json.

    python tests/unit/core/golden_vectors.py > protocol/golden.json

A client in another language checks its own encoder against these vectors. They change only together with
`FORMAT_VERSION`; test_core_golden.py fails when the code and the file part.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

if __name__ == "__main__":  # uninstalled, from the repository root
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from kvtierd.core.checksum import block_sum, fill_and_sum
from kvtierd.core.geometry import Geometry
from kvtierd.core.keys import ROOT_KEY, block_keys, foreign_key
from kvtierd.core.namespace import FORMAT_VERSION, Namespace

GQA = Geometry(block_size=16, layers=2, kv_heads=2, k_dim=64, v_dim=64)
MLA = Geometry(block_size=64, layers=3, kv_heads=1, k_dim=576, v_dim=0)
UNEVEN = Geometry(block_size=4, layers=2, kv_heads=3, k_dim=5, v_dim=7, dtype="fp32", layout="hnd")
WIDE = Geometry(block_size=128, layers=2, kv_heads=8, k_dim=128, v_dim=128, dtype="fp16")
BYTES = Geometry(block_size=32, layers=1, kv_heads=2, k_dim=64, v_dim=64, dtype="fp8_e4m3", layout="opaque:vllm-cpu")

NAMESPACES = {
    "smallest": Namespace(model="m", geometry=GQA),
    "every field": Namespace(
        model="org/Model-7B",
        geometry=UNEVEN,
        revision="0123abc",
        tenant_salt="tenant=a;b",
        lora="sql-adapter",
        lora_version="3",
        rope_digest="theta=1e6,yarn=4",
        quantisation="awq-4bit",
        tp_rank=3,
        tp_size=8,
        pp_rank=1,
        pp_size=2,
        group=5,
    ),
    "latent attention": Namespace(model="deepseek", geometry=MLA, revision="v3"),
    "rank 0 of 2": Namespace(model="m", geometry=GQA, tp_rank=0, tp_size=2),
    "rank 1 of 2": Namespace(model="m", geometry=GQA, tp_rank=1, tp_size=2),
    "second cache group": Namespace(model="m", geometry=GQA, group=1),
    "text that is not ascii": Namespace(model="模型/ü", geometry=BYTES, tenant_salt="名=値"),
}
KeysRow = tuple[str, str, list[int], int, dict[int, bytes], bytes]
"""Name, namespace, tokens, block size, extras, parent."""

TOKENS: list[KeysRow] = [
    ("no whole block", "smallest", [1, 2, 3], 4, {}, ROOT_KEY),
    ("three blocks and a tail", "smallest", list(range(100, 114)), 4, {}, ROOT_KEY),
    ("the ends of the range", "smallest", [0, 0xFFFFFFFF, 0x01020304, 7], 2, {}, ROOT_KEY),
    ("an image behind the placeholders of block 1", "every field", [9] * 12, 4, {1: b"\x00image\xff"}, ROOT_KEY),
    ("continued from a parent", "smallest", [108, 109, 110, 111], 4, {}, bytes(range(32))),
    ("one token a block", "latent attention", [5, 6], 1, {0: b"salt"}, ROOT_KEY),
]
FOREIGN = [("smallest", b""), ("smallest", bytes(range(32))), ("every field", b"\xff" * 8)]
BLOCKS = {"gqa": GQA, "mla": MLA, "uneven": UNEVEN, "wide": WIDE, "bytes": BYTES}


def pattern(count: int) -> np.ndarray:
    """Bytes of the example block: byte i is `(i * 167 + (i >> 8) * 29 + 5) mod 256`."""
    i = np.arange(count, dtype=np.uint64)
    return ((i * 167 + (i >> 8) * 29 + 5) % 256).astype(np.uint8)


def build() -> dict[str, Any]:
    """Everything in the file."""
    return {
        "about": "Golden vectors of kvtierd's block identity and checksums (protocol/SPEC.md). Bytes are hex.",
        "format_version": FORMAT_VERSION,
        "namespaces": [_namespace(name, space) for name, space in NAMESPACES.items()],
        "keys": [_keys(row) for row in TOKENS],
        "foreign_keys": [_foreign(*row) for row in FOREIGN],
        "geometries": [_geometry(name, shape) for name, shape in BLOCKS.items()],
        "block_pattern": "byte i of the packed block is (i * 167 + (i >> 8) * 29 + 5) mod 256",
        "checksums": [_checksums(name, shape) for name, shape in BLOCKS.items()],
    }


def _namespace(name: str, space: Namespace) -> dict[str, Any]:
    fields = msgspec.to_builtins(space)
    return {"name": name, "fields": fields, "canonical": space.canonical().hex(), "digest": space.digest().hex()}


def _keys(row: KeysRow) -> dict[str, Any]:
    name, space, tokens, block_size, extras, parent = row
    keys = block_keys(NAMESPACES[space].digest(), tokens, block_size, extras=extras, parent=parent)
    return {
        "name": name,
        "namespace": space,
        "tokens": tokens,
        "block_size": block_size,
        "extras": {str(block): extra.hex() for block, extra in extras.items()},
        "parent": parent.hex(),
        "keys": [key.tobytes().hex() for key in keys],
    }


def _foreign(space: str, engine_hash: bytes) -> dict[str, Any]:
    key = foreign_key(NAMESPACES[space].digest(), engine_hash)
    return {"namespace": space, "engine_hash": engine_hash.hex(), "key": key.hex()}


def _geometry(name: str, shape: Geometry) -> dict[str, Any]:
    sizes = ("k_bytes", "v_bytes", "layer_bytes", "layer_stride", "block_bytes", "slot_bytes")
    return {"name": name, "fields": msgspec.to_builtins(shape), **{size: getattr(shape, size) for size in sizes}}


def _checksums(name: str, shape: Geometry) -> dict[str, Any]:
    sums = np.zeros(shape.layers, np.uint64)
    fill_and_sum(pattern(shape.block_bytes), np.empty(shape.slot_bytes, np.uint8), shape, sums)
    return {
        "geometry": name,
        "layer_sums": [f"{int(value):016x}" for value in sums],
        "block_sum": f"{block_sum(sums):016x}",
    }


def render() -> str:
    """The file's text."""
    return json.dumps(build(), indent=1, ensure_ascii=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render())
