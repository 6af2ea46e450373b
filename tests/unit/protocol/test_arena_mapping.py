"""What a client checks before it maps a chunk, and how long a mapping lives."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvtierd.core.namespace import Namespace
from kvtierd.protocol import arena as arena_module
from kvtierd.protocol import mapping
from kvtierd.protocol.arena import Arena, ArenaError, MappedChunk
from kvtierd.protocol.client import Client
from kvtierd.protocol.messages import ArenaChunk
from kvtierd.testing.fake_chunk import CHUNK, sealed_file
from kvtierd.testing.fake_daemon import ThreadDaemon
from tests.unit.protocol.conftest import PADDED, blocks_of, keys_of


def file_of(nbytes: int, seals: int) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


BOTH = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.mark.parametrize(
    ("data_seals", "table_seals", "data_bytes", "table_bytes", "text"),
    [
        (0, BOTH, 8192, 16, "data of a chunk is not sealed"),
        (fcntl.F_SEAL_GROW, BOTH, 8192, 16, "data of a chunk is not sealed"),
        (BOTH, fcntl.F_SEAL_SHRINK, 8192, 16, "generations of a chunk is not sealed"),
        (BOTH, BOTH, 8191, 16, "8191 bytes; 8192 are announced"),
        (BOTH, BOTH, 8192, 15, "15 bytes; 16 are announced"),
    ],
)
def test_a_file_that_could_kill_us_is_not_mapped(
    data_seals: int, table_seals: int, data_bytes: int, table_bytes: int, text: str
) -> None:
    data, table = file_of(data_bytes, data_seals), file_of(table_bytes, table_seals)
    with pytest.raises(ArenaError, match=text):
        MappedChunk(ArenaChunk(1, 8192, 4096, 2), data, table)
    os.close(data)
    os.close(table)


@pytest.mark.parametrize("chunk_bytes", [0, 5 << 30])
def test_an_absurd_size_is_not_mapped(chunk_bytes: int) -> None:
    data, table = file_of(8192, BOTH), file_of(16, BOTH)
    with pytest.raises(ArenaError, match="refused"):
        MappedChunk(ArenaChunk(1, chunk_bytes, 4096, 2), data, table)
    os.close(data)
    os.close(table)


def test_a_file_that_cannot_be_sealed_is_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "plain"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file, pytest.raises(ArenaError, match=r"cannot be sealed|not sealed"):
        MappedChunk(ArenaChunk(1, 8192, 4096, 2), file.fileno(), file.fileno())


def test_generations_may_begin_anywhere_in_their_file() -> None:
    (data, _), (table, entries) = sealed_file("data", 8192), sealed_file("table", 64)
    entries[:] = bytes(40) + (7).to_bytes(8, "little") + (9).to_bytes(8, "little") + bytes(8)
    chunk = MappedChunk(ArenaChunk(1, 8192, 4096, 2, generations_first=5), data, table)
    assert chunk.generations.tolist() == [7, 9]
    for first, text in ((7, "72 are announced"), (-1, "entry -1")):
        with pytest.raises(ArenaError, match=text):
            MappedChunk(ArenaChunk(1, 8192, 4096, 2, generations_first=first), data, table)
    os.close(data)
    os.close(table)


def test_a_slot_outside_its_chunk_is_refused() -> None:
    (data, _), (table, _) = sealed_file("data", 8192), sealed_file("table", 16)
    chunk = MappedChunk(ArenaChunk(1, 8192, 4096, 2), data, table)
    assert chunk.view(4096, 4096).nbytes == 4096
    with pytest.raises(ArenaError, match="outside"):
        chunk.view(4097, 4096)
    with pytest.raises(ArenaError, match="outside"):
        chunk.view(1 << 60, 1)
    os.close(data)
    os.close(table)


def test_a_mapping_keeps_no_descriptor_and_goes_with_its_last_view() -> None:
    descriptor, _ = sealed_file("data", 8192)
    os.pwrite(descriptor, b"here", 4096)
    before = set(Path("/proc/self/fd").iterdir())
    view = np.asarray(mapping.SharedMapping(descriptor, 8192, writable=True))[4096:]
    assert set(Path("/proc/self/fd").iterdir()) <= before
    address = f"{view.__array_interface__['data'][0] - 4096:x}-"
    os.close(descriptor)
    assert address in Path("/proc/self/maps").read_text()
    assert bytes(view[:4]) == b"here"
    del view
    assert address not in Path("/proc/self/maps").read_text()
    with pytest.raises(OSError, match="Bad file descriptor"):
        mapping.SharedMapping(descriptor, 8192, writable=True)


def test_files_that_did_not_come_along_are_an_error(
    daemon: ThreadDaemon, connect: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = socket.recv_fds

    def at_the_limit(*arguments: object) -> object:
        data, descriptors, flags, address = receive(*arguments)  # type: ignore[arg-type]
        for descriptor in descriptors:
            os.close(descriptor)
        return data, [], flags, address

    monkeypatch.setattr(socket, "recv_fds", at_the_limit)
    client = connect()
    space = Namespace(model="m", geometry=PADDED)
    handle = client.register(space)
    with client.reserve(handle, keys_of(space, 1)) as reservation:
        assert reservation.views == [None]
    assert client.counters["arena_errors"] == 1
    assert client.ping() > 0
    assert not daemon.service.reservations


def test_the_generation_table_is_read_only() -> None:
    (data, _), (table, _) = sealed_file("data", 8192), sealed_file("table", 16)
    chunk = MappedChunk(ArenaChunk(1, 8192, 4096, 2), data, table)
    with pytest.raises(ValueError, match="read-only"):
        chunk.generations[0] = 1
    os.close(data)
    os.close(table)


def test_a_view_outlives_its_chunk(connect: Callable[..., Client], daemon: ThreadDaemon) -> None:
    client = connect()
    space = Namespace(model="m", geometry=PADDED)
    handle = client.register(space)
    keys, blocks = keys_of(space, 1), blocks_of(space, 1)
    client.store(handle, keys, blocks)
    lease = client.acquire(handle, keys)
    assert daemon.server.arena is not None
    daemon.call(lambda: daemon.server.arena.chunk_gone(CHUNK))  # type: ignore[union-attr]
    client._slots._arena._forget_gone()  # type: ignore[union-attr]
    assert client._slots._arena.chunk(CHUNK) is None  # type: ignore[union-attr]
    np.testing.assert_array_equal(lease.views[0][:384], blocks[0][:384])
    assert client.fetch(handle, keys).count == 1  # it is mapped again: the daemon still has it
    mapped = len(mapping._alive)
    client.close()
    del lease
    assert len(mapping._alive) == mapped - 4


def test_a_chunk_that_cannot_be_mapped_is_a_miss_and_gives_back(
    connect: Callable[..., Client], daemon: ThreadDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect()
    space = Namespace(model="m", geometry=PADDED)
    handle = client.register(space)
    keys = keys_of(space, 2)
    client.store(handle, keys[:1], blocks_of(space, 1))
    client._slots._arena._chunks.clear()  # type: ignore[union-attr]
    monkeypatch.setattr(arena_module, "MAX_CHUNKS", 0)
    with client.acquire(handle, keys) as lease:
        assert lease.count == 0
    with client.reserve(handle, keys[1:]) as reservation:
        assert reservation.views == [None]
    assert client.counters["arena_errors"] == 2
    assert client.stats()["slots_free"] == 63
    assert not daemon.service.leases


def test_an_arena_socket_that_says_nothing_is_given_up(folder: Path) -> None:
    path = str(folder / "mute.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        with pytest.raises(ArenaError, match="did not answer"):
            Arena.attach(path, bytes(16), time.monotonic_ns() + 50_000_000)


@pytest.mark.parametrize("nbytes", [8192, mapping.HUGE_PAGE_BYTES, 3 * mapping.HUGE_PAGE_BYTES + 4097])
def test_a_large_mapping_begins_where_a_huge_page_may_and_takes_no_addresses_beside_it(nbytes: int) -> None:
    descriptor, _ = sealed_file("data", nbytes)
    os.pwrite(descriptor, b"end", nbytes - 3)
    mapped = mapping.SharedMapping(descriptor, nbytes, writable=True)
    os.close(descriptor)
    assert bytes(np.asarray(mapped)[-3:]) == b"end"
    if nbytes >= mapping.HUGE_PAGE_BYTES:
        assert mapped.address % mapping.HUGE_PAGE_BYTES == 0
    line = f"{mapped.address:x}-{-(-(mapped.address + nbytes) // 4096) * 4096:x} rw-s"
    assert line in Path("/proc/self/maps").read_text()
    reserved = f"{mapped.address + -(-nbytes // 4096) * 4096:x}-"
    begins = [found for found in Path("/proc/self/maps").read_text().splitlines() if found.startswith(reserved)]
    assert not any("---p 00000000 00:00 0" in found for found in begins)


def test_collapsing_keeps_bytes_and_fills_holes_with_zeros() -> None:
    nbytes = 2 * mapping.HUGE_PAGE_BYTES
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, nbytes)
    for begin in range(0, nbytes, mapping.HUGE_PAGE_BYTES):
        os.pwrite(descriptor, b"kept", begin + 4096)
    mapped = mapping.SharedMapping(descriptor, nbytes, writable=True)
    os.close(descriptor)
    refused = mapped.collapse()
    memory = np.asarray(mapped)
    assert [bytes(memory[begin + 4096 :][:4]) for begin in range(0, nbytes, mapping.HUGE_PAGE_BYTES)] == [b"kept"] * 2
    assert np.count_nonzero(memory) == 8
    assert refused in {0, errno.EINVAL, errno.ENOMEM, errno.EAGAIN, errno.EBUSY}
