"""Log lines: text on a terminal, JSON otherwise; repeated lines are rate-limited, payloads never appear.

Modules log through `logging.getLogger(__name__)` with `%`-style arguments; fields for machines go into
`extra={"fields": {...}}`.
"""

from __future__ import annotations

import datetime as dt
import logging
import sys
import time
from collections.abc import Callable
from typing import IO, Any

import msgspec

ROOT = "kvtierd"
BURST_LINES = 10
BURST_WINDOW_S = 10.0
MAX_TEMPLATES = 1024
"""Most templates the limiter remembers; more in one window share the oldest's fate of being forgotten."""


def configure(level: str, form: str, stream: IO[str] | None = None) -> None:
    """Send the lines of every kvtierd logger to a stream (stderr by default).

    `level` is debug, info, warning or error; `form` is text, json or auto (text on a terminal).
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    text = form == "text" or (form == "auto" and stream.isatty())
    handler.setFormatter(TextFormatter() if text else JsonFormatter())
    handler.addFilter(RateLimit())
    handler.addFilter(hide_payloads)
    logger = logging.getLogger(ROOT)
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


class TextFormatter(logging.Formatter):
    """`05:39:01.250 WARNING tiers.mover: message field=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback below it where there is one."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        line = f"{clock}.{int(record.msecs):03} {record.levelname:<7} {_short(record.name)}: {_message(record)}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, logger, message, and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback is a field of it."""
        entry: dict[str, Any] = {
            "time": dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        entry |= {name: value for name, value in _fields(record).items() if name not in entry}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry, enc_hook=_plain).decode()


class RateLimit(logging.Filter):
    """Lets `BURST_LINES` lines of one template through per window; the next window's first line tells the rest.

    Errors of one fault come in thousands; their count matters, their repetition buries everything else.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now_s = now_s
        self._windows: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line may be written."""
        key, now = (record.name, record.levelno, str(record.msg)), self._now_s()
        begin, seen = self._windows.get(key, (now, 0))
        if now - begin >= BURST_WINDOW_S:
            record.suppressed = max(0, seen - BURST_LINES)
            begin, seen = now, 0
        self._windows[key] = (begin, seen + 1)
        if len(self._windows) > MAX_TEMPLATES:
            del self._windows[next(iter(self._windows))]
        return seen < BURST_LINES


def hide_payloads(record: logging.LogRecord) -> bool:
    """Replace raw bytes among a line's arguments by their length: they may be somebody's prompt."""
    if isinstance(record.args, tuple):
        record.args = tuple(_hidden(value) for value in record.args)
    return True


def _hidden(value: Any) -> Any:
    # Arrays count as raw bytes, NumPy's scalars (ndim 0) as numbers.
    if isinstance(value, bytes | bytearray | memoryview) or bool(getattr(value, "ndim", 0)):
        return f"<{memoryview(value).nbytes} bytes>"
    return value


def _plain(value: Any) -> Any:
    """What JSON has no word for: NumPy's scalars as numbers, the rest as text."""
    return value.item() if hasattr(value, "item") else str(value)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: _hidden(value) for name, value in getattr(record, "fields", {}).items()}


def _message(record: logging.LogRecord) -> str:
    suppressed = getattr(record, "suppressed", 0)
    suffix = f" ({suppressed} more like this were not written)" if suppressed else ""
    return record.getMessage() + suffix


def _short(name: str) -> str:
    return name.removeprefix(f"{ROOT}.")
