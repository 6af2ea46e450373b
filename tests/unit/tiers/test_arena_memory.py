"""Where a chunk's bytes lie: wholly allocated, and in huge pages where the kernel gives them."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import numpy as np
import pytest

from kvtierd.core.units import MIB
from kvtierd.protocol.mapping import SharedMapping
from kvtierd.tiers import arena
from kvtierd.tiers.arena import Chunk


def huge_kib(chunk: Chunk) -> int:
    """How much of a chunk's mapping here lies in huge pages, in KiB."""
    begin = format(chunk.memory.__array_interface__["data"][0], "x")
    text = Path("/proc/self/smaps").read_text()
    found = re.search(rf"^{begin}-.*?^ShmemPmdMapped: +(\d+) kB", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    return int(found[1])


def test_a_chunk_is_wholly_allocated_whatever_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for refused in (False, True):
        if refused:
            monkeypatch.setattr(SharedMapping, "collapse", lambda _mapping: errno.EINVAL)
        chunk = Chunk(1, 5 * MIB)
        assert os.fstat(chunk.data_fd).st_blocks * 512 >= 5 * MIB
        assert not chunk.memory.any()
        chunk.close()


def test_a_chunk_lies_in_huge_pages_where_the_kernel_gives_them() -> None:
    chunk = Chunk(1, 4 * MIB)
    chunk.memory[:] = 7
    probe = SharedMapping(chunk.data_fd, 4 * MIB, writable=True)
    expected = 0 if probe.collapse() else 4 * MIB >> 10
    assert huge_kib(chunk) == expected
    chunk.close()


def test_a_discarded_chunk_takes_no_memory_though_others_map_it() -> None:
    chunk = Chunk(1, 5 * MIB)
    chunk.memory[:] = 7
    fd = os.dup(chunk.data_fd)
    theirs = np.asarray(SharedMapping(fd, 5 * MIB, writable=True))
    assert theirs[-1] == 7
    chunk.discard()
    assert os.fstat(fd).st_blocks == 0
    assert not theirs[::MIB].any(), "whoever still looks sees zeros, and no SIGBUS"
    os.close(fd)


def test_a_chunk_that_cannot_be_punched_is_closed_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_fd: int, _offset: int, _length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no holes here")

    monkeypatch.setattr(arena, "punch", refuse)
    chunk = Chunk(3, MIB)
    fd = chunk.data_fd
    chunk.discard()
    assert "chunk 3 stays in memory" in caplog.text
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
