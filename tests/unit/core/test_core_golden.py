"""The golden vectors, the code and a second implementation of the prose must agree."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import blake3
import pytest
import xxhash

from tests.unit.core.golden_vectors import render

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "protocol" / "golden.json").read_text()
GOLDEN: dict[str, Any] = json.loads(TEXT)
DIGESTS = {row["name"]: bytes.fromhex(row["digest"]) for row in GOLDEN["namespaces"]}
SHAPES = {row["name"]: row for row in GOLDEN["geometries"]}

# From here on nothing of kvtierd is used: what a client in another language would write from DESIGN §5 and SPEC §3.

FIELD_ORDER = [
    *("tenant_salt", "model", "revision", "lora", "lora_version", "rope_digest", "quantisation", "dtype", "layout"),
    *("block_size", "layers", "kv_heads", "k_dim", "v_dim", "tp_rank", "tp_size", "pp_rank", "pp_size", "group"),
    "format",
]
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 1}


def encode_namespace(fields: dict[str, Any]) -> bytes:
    flat = {**fields, **fields["geometry"], "format": 1}
    encoded = b""
    for name in FIELD_ORDER:
        item = name.encode("utf-8") + b"=" + str(flat[name]).encode("utf-8")
        encoded += struct.pack("<I", len(item)) + item
    return encoded


def chain(digest: bytes, row: dict[str, Any]) -> list[str]:
    size, previous, keys = row["block_size"], bytes.fromhex(row["parent"]), []
    for block in range(len(row["tokens"]) // size):
        extra = bytes.fromhex(row["extras"].get(str(block), ""))
        tokens = row["tokens"][block * size : (block + 1) * size]
        message = digest + previous + struct.pack("<I", len(extra)) + extra + struct.pack(f"<{size}I", *tokens)
        previous = blake3.blake3(message).digest()
        keys.append(previous.hex())
    return keys


def part_sizes(fields: dict[str, Any]) -> dict[str, int]:
    element = ELEMENT_BYTES[fields["dtype"]]
    k_bytes = fields["block_size"] * fields["kv_heads"] * fields["k_dim"] * element
    v_bytes = fields["block_size"] * fields["kv_heads"] * fields["v_dim"] * element
    stride = (k_bytes + v_bytes + 4095) // 4096 * 4096
    return {
        "k_bytes": k_bytes,
        "v_bytes": v_bytes,
        "layer_bytes": k_bytes + v_bytes,
        "layer_stride": stride,
        "block_bytes": (k_bytes + v_bytes) * fields["layers"],
        "slot_bytes": stride * fields["layers"],
    }


def checksums(shape: dict[str, Any]) -> tuple[list[str], str]:
    count = shape["block_bytes"]
    packed = bytes((i * 167 + (i >> 8) * 29 + 5) % 256 for i in range(count))
    size = shape["layer_bytes"]
    sums = [xxhash.xxh3_64_intdigest(packed[at : at + size]) for at in range(0, count, size)]
    whole = xxhash.xxh3_64_intdigest(b"".join(struct.pack("<Q", value) for value in sums))
    return [f"{value:016x}" for value in sums], f"{whole:016x}"


def test_the_hash_libraries_give_their_published_answers() -> None:
    assert blake3.blake3(b"").hexdigest() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert xxhash.xxh3_64_hexdigest(b"") == "2d06800538d394c2"


def test_the_file_is_what_the_code_makes() -> None:
    assert render() == TEXT


@pytest.mark.parametrize("row", GOLDEN["namespaces"], ids=lambda row: row["name"])
def test_namespaces_agree_with_the_prose(row: dict[str, Any]) -> None:
    encoded = encode_namespace(row["fields"])
    assert encoded.hex() == row["canonical"]
    assert blake3.blake3(b"kvtierd namespace" + encoded).hexdigest() == row["digest"]


def test_every_namespace_has_a_digest_of_its_own() -> None:
    assert len(set(DIGESTS.values())) == len(GOLDEN["namespaces"])


@pytest.mark.parametrize("row", GOLDEN["keys"], ids=lambda row: row["name"])
def test_keys_agree_with_the_prose(row: dict[str, Any]) -> None:
    assert chain(DIGESTS[row["namespace"]], row) == row["keys"]


@pytest.mark.parametrize("row", GOLDEN["foreign_keys"], ids=lambda row: row["engine_hash"][:8] or "empty")
def test_foreign_keys_agree_with_the_prose(row: dict[str, Any]) -> None:
    message = DIGESTS[row["namespace"]] + bytes.fromhex(row["engine_hash"])
    assert blake3.blake3(message).hexdigest() == row["key"]


@pytest.mark.parametrize("row", GOLDEN["geometries"], ids=lambda row: row["name"])
def test_sizes_agree_with_the_prose(row: dict[str, Any]) -> None:
    sizes = part_sizes(row["fields"])
    assert {name: row[name] for name in sizes} == sizes


@pytest.mark.parametrize("row", GOLDEN["checksums"], ids=lambda row: row["geometry"])
def test_checksums_agree_with_the_prose(row: dict[str, Any]) -> None:
    sums, whole = checksums(SHAPES[row["geometry"]])
    assert (row["layer_sums"], row["block_sum"]) == (sums, whole)
