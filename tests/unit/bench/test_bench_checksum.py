from __future__ import annotations

from kvtierd.bench import checksum
from kvtierd.bench.checksum import watched
from kvtierd.storage import reader
from kvtierd.storage.io_posix import PosixFile


def test_what_is_timed_is_there_and_is_put_back() -> None:
    sums, read = getattr(reader, checksum.SUMS), PosixFile.read
    with watched() as watch:
        assert getattr(reader, checksum.SUMS) is not sums
        assert PosixFile.read is not read
    assert getattr(reader, checksum.SUMS) is sums
    assert PosixFile.read is read
    assert not watch.spent_ns
