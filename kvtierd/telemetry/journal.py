"""Log lines as entries of systemd's journal, each field by its own name (the journal's native protocol).

`journalctl -u kvtierd KVTIERD_TIER=nvme` then finds what a text search would only guess. The protocol is a datagram of
`NAME=value` lines, with a length in place of `=` where the value has line breaks
(https://systemd.io/JOURNAL_NATIVE_PROTOCOL). The binding that systemd offers compiles against libsystemd; these lines
need nothing.
"""

from __future__ import annotations

import array
import errno
import fcntl
import logging
import os
import re
import socket
import sys
from collections.abc import Mapping
from typing import IO, Any, Final

from kvtierd.telemetry.fields import as_json_text, fields_of, message_of

SOCKET = "/run/systemd/journal/socket"
IDENTIFIER = "kvtierd"
PREFIX = "KVTIERD_"
MAX_NAME = 64
"""The journal drops a field with a longer name."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (0, 7))
_NO_NAME = re.compile(r"[^A-Z0-9_]")


def is_journal(stream: IO[str]) -> bool:
    """Whether systemd connected this stream to its journal: $JOURNAL_STREAM names its device and inode."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return (device, inode) == (str(status.st_dev), str(status.st_ino))


class JournalHandler(logging.Handler):
    """Sends each record as one entry. What the journal does not take goes to standard error as text."""

    def __init__(self, path: str = SOCKET) -> None:
        super().__init__()
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record. Never raises, as no handler does: a log line must not stop a service."""
        try:
            self._send(encode(entry_of(record)))
        except OSError:
            sys.stderr.write(f"{message_of(record)}\n")
        except Exception:  # noqa: BLE001 - what cannot be written is told to logging's own handler of such errors
            self.handleError(record)

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()
        super().close()

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendto(data, self._path)
        except OSError as error:
            if error.errno not in {errno.EMSGSIZE, errno.ENOBUFS}:
                raise
            self._send_as_file(data)

    def _send_as_file(self, data: bytes) -> None:
        """An entry larger than a datagram travels as a sealed memfd."""
        fd = os.memfd_create("journal-entry", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            # Not socket.send_fds: it forgets the address before Python 3.12.
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
            self._socket.sendmsg([b""], [rights], 0, self._path)
        finally:
            os.close(fd)


def entry_of(record: logging.LogRecord) -> dict[str, str]:
    """The fields of one entry."""
    entry = {
        "MESSAGE": message_of(record),
        "PRIORITY": str(next(number for level, number in _PRIORITIES if record.levelno >= level)),
        "SYSLOG_IDENTIFIER": IDENTIFIER,
        "LOGGER": record.name,
        "CODE_FILE": record.pathname,
        "CODE_LINE": str(record.lineno),
        "CODE_FUNC": record.funcName or "",
    }
    for name, value in fields_of(record).items():
        entry[_name(name)] = value if isinstance(value, str) else as_json_text(value)
    if record.exc_info:
        entry["TRACEBACK"] = logging.Formatter().formatException(record.exc_info)
    return entry


def encode(entry: Mapping[str, Any]) -> bytes:
    """An entry in the journal's native form."""
    parts = []
    for name, value in entry.items():
        data = str(value).encode(errors="replace")
        if b"\n" in data:
            parts.append(b"%b\n%b%b\n" % (name.encode(), len(data).to_bytes(8, "little"), data))
        else:
            parts.append(b"%b=%b\n" % (name.encode(), data))
    return b"".join(parts)


def _name(field: str) -> str:
    """A field's name as the journal takes it: capitals, digits and underscores."""
    return PREFIX + _NO_NAME.sub("_", field.upper())[: MAX_NAME - len(PREFIX)]
