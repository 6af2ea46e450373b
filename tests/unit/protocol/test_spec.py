"""SPEC.md says what the code does: its example, its tables, its codes."""

from __future__ import annotations

import re
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvtierd.core.checksum import block_sum
from kvtierd.core.errors import ErrorCode
from kvtierd.core.geometry import Geometry
from kvtierd.core.keys import block_keys
from kvtierd.core.namespace import FORMAT_VERSION, Namespace
from kvtierd.protocol import messages
from kvtierd.protocol.codec import MAX_ERROR_TEXT, OPERATIONS, check_frames, decode_reply, decode_request, encode
from kvtierd.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvtierd.protocol.handover import MAX_ARENA_MESSAGE_BYTES
from kvtierd.protocol.messages import AnyReply, AnyRequest, Lookup, NamespaceReply, RegisterNamespace
from kvtierd.protocol.sessions import Limits

SPEC = (Path(__file__).parents[3] / "protocol" / "SPEC.md").read_text()
SPACE = Namespace(model="m", geometry=Geometry(block_size=16, layers=2, kv_heads=2, k_dim=64, v_dim=64))


def section(number: int) -> str:
    found = re.search(rf"^## {number}\. .*?(?=^## |\Z)", SPEC, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[0]


def table(text: str) -> list[list[str]]:
    """Cells of every row, header and ruler left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    return [row for row in rows[2:] if not set(row[0]) <= {"-", "|"}]


def example() -> list[tuple[str, str, bytes, list[bytes]]]:
    """(direction, op, header, frames) of each message in §12."""
    found: list[tuple[str, str, bytes, list[bytes]]] = []
    block = re.search(r"```hex\n(.*?)```", section(12), re.DOTALL)
    assert block is not None
    for line in block[1].splitlines():
        if line.startswith("  frame"):
            found[-1][3].append(bytes.fromhex(line.split()[2]))
        else:
            direction, op, header = line.split()
            found.append((direction, op, bytes.fromhex(header), []))
    return found


@pytest.mark.parametrize("position", range(16))
def test_the_example_decodes_and_encodes_to_the_same_bytes(position: int) -> None:
    direction, op, header, frames = example()[position]
    message: AnyRequest | AnyReply
    if direction == "request":
        request = decode_request(header)
        check_frames(request, [memoryview(frame) for frame in frames])
        message = request
    else:
        message = decode_reply(header)
    assert type(message).__struct_config__.tag == op
    assert encode(message) == header


def test_the_example_is_about_the_namespace_that_it_names() -> None:
    said = {op: (header, frames) for _, op, header, frames in example()}
    register = decode_request(said["register"][0])
    assert isinstance(register, RegisterNamespace)
    assert register.namespace == SPACE
    answer = decode_reply(said["register_ok"][0])
    assert isinstance(answer, NamespaceReply)
    assert answer.digest == SPACE.digest()
    keys = block_keys(SPACE.digest(), range(16), 16)
    assert said["reserve"][1] == [keys.tobytes()]
    layer_sums, sums = said["commit"][1]
    rows = np.frombuffer(layer_sums, "<u8")
    assert rows.tolist() == [0x1111, 0x2222]
    assert np.frombuffer(sums, "<u8").tolist() == [block_sum(rows)]
    (slot,) = np.frombuffer(said["acquire_ok"][1][0], messages.SLOT_DTYPE)
    assert slot.tolist() == (3, 0, 2, 0, 16384, 5)
    assert isinstance(decode_request(example()[14][2]), Lookup)


def test_the_table_of_operations_names_every_field() -> None:
    rows = {row[0].strip("`"): row for row in table(section(4))}
    assert tuple(rows) == OPERATIONS
    requests = {str(kind.__struct_config__.tag): kind for kind in messages.AnyRequest.__args__}
    replies = {str(kind.__struct_config__.tag): kind for kind in messages.AnyReply.__args__}
    for op, row in rows.items():
        said = set(re.findall(r"`(\w+)`", re.sub(r"\(.*?\)|`(gpu|host)`", "", row[1])))
        assert said == set(requests[op].__struct_fields__) - {"id", "epoch", "deadline_ns"}, op
        reply = replies[re.findall(r"`(\w+)`", row[3])[0]]
        assert set(re.findall(r"`(\w+)`", row[4])) == set(reply.__struct_fields__) - {"id", "epoch"}, op


def test_the_table_of_namespace_fields_is_the_canonical_encoding() -> None:
    rows = [row for row in table(section(3)) if len(row) == 3 and row[0].isdigit()]
    encoded, names = SPACE.canonical(), []
    while encoded:
        size = int.from_bytes(encoded[:4], "little")
        names.append(encoded[4 : 4 + size].decode().split("=")[0])
        encoded = encoded[4 + size :]
    assert [row[1].strip("`") for row in rows] == names
    assert rows[-1][2] == str(FORMAT_VERSION)


@pytest.mark.parametrize(("name", "dtype"), [("Slot descriptor", messages.SLOT_DTYPE), ("Span", messages.SPAN_DTYPE)])
def test_the_byte_tables_of_descriptors_are_their_dtypes(name: str, dtype: np.dtype[np.void]) -> None:
    _, _, text = section(3).partition(f"**{name}**, {dtype.itemsize} bytes")
    text = text.partition("\n**")[0]
    rows = [row for row in table(text) if len(row) == 4 and row[0].isdigit()]
    assert dtype.fields is not None
    got = [(row[2].strip("`"), int(row[0]), int(row[1])) for row in rows]
    assert got == [(name, offset, kind.itemsize) for name, (kind, offset, *_) in dtype.fields.items()]


def test_every_error_code_has_its_row() -> None:
    assert [row[0].strip("`") for row in table(section(6))] == [code.value for code in ErrorCode]
    assert f"at most {MAX_ERROR_TEXT} characters" in section(6)


def test_limits_are_those_of_the_code() -> None:
    text = section(7)
    assert f"{messages.MAX_HEADER_BYTES:,} bytes" in text
    assert f"at most {messages.MAX_BATCH:,}" in text
    assert f"daemon allows, {Limits().default_deadline_s:.0f} s" in text
    assert f"at most {MAX_ARENA_MESSAGE_BYTES:,} bytes" in section(8)


def test_every_arena_message_and_event_is_described() -> None:
    rows = {row[0].strip("`"): row for row in table(section(8))}
    kinds = (*messages.AnyArenaRequest.__args__, *messages.AnyArenaReply.__args__)
    assert set(rows) == {str(kind.__struct_config__.tag) for kind in kinds}
    for kind in kinds:
        said = re.findall(r"`(\w+)`", rows[str(kind.__struct_config__.tag)][2])
        assert said == list(kind.__struct_fields__)
    for event in (BlockStored, BlockRemoved, AllBlocksCleared):
        assert f'["{event.__name__}"' in section(10)


@pytest.mark.parametrize("kind", [*messages.AnyRequest.__args__, *messages.AnyReply.__args__], ids=lambda k: k.__name__)
def test_a_message_survives_the_wire_and_fields_that_it_does_not_know(kind: type[msgspec.Struct]) -> None:
    samples = {
        "namespace": SPACE if kind is RegisterNamespace else 3,
        "namespaces": [1, 2],
        "leases": [4, 1 << 40],
        "sequences": [5, 1 << 40],
        "layers": [0, 31],
        "lengths": [17, 1 << 20],
        "dtype": "fp16",
        "output": "fp16",
        "loss": "pressure",
        "scale": 0.125,
        "causal": False,
        "sinks": True,
        "digest": SPACE.digest(),
        "token": b"t" * 16,
        "resume": b"r" * 16,
        "tiers": ["gpu"] if kind is messages.Purge else b"\1\2",
        "codecs": b"\0\1",
        "code": ErrorCode.BUSY,
        "stats": {"blocks": 3, "mode": "o_direct"},
        "tier": "gpu",
        "index": [0, 2],
        "parts": [64, 192],
        "parent": b"p" * 32,
        "versions": (1, 4),
        "verify": True,
        "quiet": True,
        "wait": True,
        "allow_loss": True,
    }
    text = {"client", "server", "arena", "message"}
    values = {name: samples.get(name, "text" if name in text else 7) for name in kind.__struct_fields__}
    message = kind(**values)
    decode = decode_request if kind in messages.AnyRequest.__args__ else decode_reply
    header = encode(message)
    assert decode(header) == message
    grown = msgspec.msgpack.decode(header) | {"new_field": {"deep": [1, None]}}
    assert decode(msgspec.msgpack.encode(grown)) == message


def test_deadlines_are_on_the_clock_of_the_host() -> None:
    assert time.get_clock_info("monotonic").implementation == "clock_gettime(CLOCK_MONOTONIC)"
