"""Requests of one transfer that fail: every one is waited for, and what is told is what a system call would say."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtierd.storage.buffers import page_buffer
from kvtierd.storage.io_kvikio import KvikioFile, as_os_error

BROKEN = "KvikIO failure at: /build/posix_io.hpp:173: POSIX error on pread: Input/output error"


class Future:
    def __init__(self, outcome: int | Exception) -> None:
        self.outcome = outcome
        self.waited = False

    def get(self) -> int:
        self.waited = True
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class FakeCuFile:
    """Gives the outcomes in turn; one that is a ValueError is raised at once, as for memory that KvikIO refuses."""

    def __init__(self, path: Path, outcomes: list[int | Exception]) -> None:
        self.outcomes = outcomes
        self.futures: list[Future] = []
        self.offsets: list[int] = []
        self.closed = False
        self._file = path.open("wb+")
        self._file.truncate(65536)

    def fileno(self) -> int:
        return self._file.fileno()

    def pread(self, _buffer: Any, _size: int, offset: int) -> Future:
        outcome = self.outcomes[len(self.futures)]
        if isinstance(outcome, ValueError):
            raise outcome
        self.offsets.append(offset)
        self.futures.append(Future(outcome))
        return self.futures[-1]

    pwrite = pread

    def close(self) -> None:
        self.closed = True
        self._file.close()


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize(
    ("outcomes", "told"),
    [
        ([4096, 4096, 4096], 12288),
        ([4096, 100, 4096], 4196),
        ([4096, RuntimeError(BROKEN), 4096], 4096),
        ([4096, 4096, ValueError("not contiguous")], 8192),
        ([RuntimeError(BROKEN), 4096, RuntimeError("other")], errno.EIO),
        ([RuntimeError("x: No space left on device"), 4096, 4096], errno.ENOSPC),
        ([ValueError("not contiguous"), 0, 0], errno.EIO),
    ],
)
def test_case_04_failure_half_way_is_a_short_transfer_and_at_the_start_an_error(
    tmp_path: Path, verb: str, outcomes: list[int | Exception], told: int
) -> None:
    inner = FakeCuFile(tmp_path / "file", outcomes)
    file = KvikioFile(inner)
    buffers = [page_buffer(4096) for _ in range(3)]
    transfer = file.read if verb == "read" else file.write
    if told in {errno.EIO, errno.ENOSPC}:
        with pytest.raises(OSError, match=r"error|space|contiguous") as caught:
            transfer(buffers, 8192)
        assert caught.value.errno == told
    else:
        assert transfer(buffers, 8192) == told
    assert all(future.waited for future in inner.futures), "memory was let go while KvikIO still used it"
    assert inner.offsets == [8192 + 4096 * number for number in range(len(inner.futures))]
    file.close()
    file.close()
    assert inner.closed


def test_nothing_is_asked_for_beyond_the_end(tmp_path: Path) -> None:
    inner = FakeCuFile(tmp_path / "file", [4096, 4096])
    file = KvikioFile(inner)
    assert file.read([np.zeros(4096, np.uint8), np.zeros(8192, np.uint8)], 61440) == 4096
    assert file.read([np.zeros(4096, np.uint8)], 65536) == 0
    assert len(inner.futures) == 1
    file.close()


def test_words_of_the_system_keep_their_number() -> None:
    assert as_os_error(RuntimeError(BROKEN)).errno == errno.EIO
    assert as_os_error(RuntimeError("a: b: No such file or directory\n")).errno == errno.ENOENT
    strange = as_os_error(RuntimeError("a: EOF"))
    assert (strange.errno, strange.strerror) == (errno.EIO, "EOF")
