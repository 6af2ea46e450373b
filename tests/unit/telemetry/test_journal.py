"""What arrives at a journal's socket."""

from __future__ import annotations

import array
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtierd.telemetry import log
from kvtierd.telemetry.journal import JournalHandler, encode, is_journal


class Journal:
    """A journal's end of the socket, and a reader of its protocol."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._socket.settimeout(10)

    def entry(self) -> dict[str, str]:
        data, ancillary, _flags, _address = self._socket.recvmsg(1 << 20, socket.CMSG_SPACE(4))
        for _level, _kind, raw in ancillary:
            (fd,) = array.array("i", raw)
            with os.fdopen(fd, "rb") as file:
                file.seek(0)
                data = file.read()
        return dict(_parse(data))

    def close(self) -> None:
        self._socket.close()


def _parse(data: bytes) -> Iterator[tuple[str, str]]:
    while data:
        line, _, rest = data.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            size = int.from_bytes(rest[:8], "little")
            value, rest = rest[8 : 8 + size], rest[9 + size :]
        yield name.decode(), value.decode()
        data = rest


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    listening = Journal(tmp_path / "socket")
    yield listening
    listening.close()


@pytest.fixture
def logger(journal: Journal) -> Iterator[logging.Logger]:
    handler = JournalHandler(journal.path)
    found = logging.getLogger("kvtierd-journal-test")
    found.handlers, found.propagate = [handler], False
    yield found
    handler.close()


def test_fields_have_names_of_their_own(logger: logging.Logger, journal: Journal) -> None:
    fields = {"tier": "nvme", "namespace": "m@1", "block_key": "ab12", "request": 7, "n": np.uint64(3)}
    logger.warning("read of %d blocks failed", 2, extra={"fields": fields})
    entry = journal.entry()
    assert entry["MESSAGE"] == "read of 2 blocks failed"
    assert (entry["PRIORITY"], entry["LOGGER"]) == ("4", "kvtierd-journal-test")
    assert entry["SYSLOG_IDENTIFIER"] == "kvtierd"
    assert [entry[f"KVTIERD_{name}"] for name in ("TIER", "NAMESPACE", "BLOCK_KEY", "REQUEST", "N")] == [
        "nvme", "m@1", "ab12", "7", "3",
    ]  # fmt: skip
    assert (entry["CODE_FILE"], entry["CODE_FUNC"]) == (__file__, "test_fields_have_names_of_their_own")


@pytest.mark.parametrize(
    ("level", "priority"), [(10, "7"), (20, "6"), (25, "6"), (30, "4"), (40, "3"), (50, "2"), (5, "7")]
)
def test_levels_are_priorities_of_syslog(logger, journal: Journal, level: int, priority: str) -> None:
    logger.setLevel(1)
    logger.log(level, "hello")
    assert journal.entry()["PRIORITY"] == priority


def test_line_breaks_do_not_make_fields(logger: logging.Logger, journal: Journal) -> None:
    logger.error("one\nPRIORITY=0\ntwo", extra={"fields": {"bad name=": "a\nb"}})
    entry = journal.entry()
    assert entry["MESSAGE"] == "one\nPRIORITY=0\ntwo"
    assert (entry["PRIORITY"], entry["KVTIERD_BAD_NAME_"]) == ("3", "a\nb")


def test_traceback_is_a_field(logger: logging.Logger, journal: Journal) -> None:
    try:
        raise KeyError("lost")
    except KeyError:
        logger.exception("failed")
    assert "KeyError: 'lost'" in journal.entry()["TRACEBACK"]


def test_payload_is_not_written(logger: logging.Logger, journal: Journal) -> None:
    logger.handlers[0].addFilter(log.hide_payloads)
    logger.error("got %s", b"secret", extra={"fields": {"data": bytearray(b"secret"), "array": np.zeros(9, np.uint8)}})
    entry = journal.entry()
    assert entry["MESSAGE"] == "got <6 bytes>"
    assert (entry["KVTIERD_DATA"], entry["KVTIERD_ARRAY"]) == ("<6 bytes>", "<9 bytes>")


def test_entry_larger_than_a_datagram_arrives(logger: logging.Logger, journal: Journal) -> None:
    logger.setLevel(20)
    logger.info("%s", "x" * (4 << 20), extra={"fields": {"tier": "host"}})
    entry = journal.entry()
    assert (len(entry["MESSAGE"]), entry["KVTIERD_TIER"]) == (4 << 20, "host")


def test_without_a_journal_the_line_is_not_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler = JournalHandler(str(tmp_path / "nobody"))
    handler.emit(logging.makeLogRecord({"msg": "important", "levelno": 40, "name": "x"}))
    handler.close()
    assert capsys.readouterr().err == "important\n"


def test_stream_is_the_journals_only_where_systemd_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "stderr").open("w") as stream:
        status = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        assert is_journal(stream)
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino + 1}")
        assert not is_journal(stream)
        monkeypatch.delenv("JOURNAL_STREAM")
        assert not is_journal(stream)


def test_encoding_is_that_of_the_protocol() -> None:
    assert encode({"A": "x", "B": "y\nz"}) == b"A=x\nB\n\x03\x00\x00\x00\x00\x00\x00\x00y\nz\n"
