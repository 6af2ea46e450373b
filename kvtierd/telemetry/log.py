"""Log lines: to systemd's journal with their fields, as text on a terminal, as JSON otherwise.

Repeated lines are rate-limited, payloads never appear.

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

from kvtierd.telemetry.fields import fields_of, hide_payloads, message_of, plain
from kvtierd.telemetry.journal import JournalHandler, is_journal

ROOT = "kvtierd"
BURST_LINES = 10
BURST_WINDOW_S = 10.0
MAX_TEMPLATES = 1024
"""Most templates the limiter remembers; more in one window share the oldest's fate of being forgotten."""


def configure(level: str, form: str, stream: IO[str] | None = None) -> None:
    """Send the lines of every kvtierd logger to a stream (stderr by default).

    `level` is debug, info, warning or error; `form` is journal, text, json, or auto, which takes the journal where
    systemd connected the stream to it, and text on a terminal. May be called again.
    """
    handler = _handler(form, stream or sys.stderr)
    handler.addFilter(RateLimit())
    handler.addFilter(hide_payloads)
    logger = logging.getLogger(ROOT)
    before, logger.handlers = logger.handlers, [handler]
    for old in before:
        if isinstance(old, JournalHandler):
            old.close()
    logger.setLevel(level.upper())
    logger.propagate = False


def _handler(form: str, stream: IO[str]) -> logging.Handler:
    if form == "journal" or (form == "auto" and is_journal(stream)):
        return JournalHandler()
    handler = logging.StreamHandler(stream)
    text = form == "text" or (form == "auto" and stream.isatty())
    handler.setFormatter(TextFormatter() if text else JsonFormatter())
    return handler


class TextFormatter(logging.Formatter):
    """`05:39:01.250 WARNING tiers.mover: message field=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback below it where there is one."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {name}={value}" for name, value in fields_of(record).items())
        line = (
            f"{clock}.{int(record.msecs):03} {record.levelname:<7} {_short(record.name)}: {message_of(record)}{fields}"
        )
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, logger, message, and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback is a field of it."""
        entry: dict[str, Any] = {
            "time": dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message_of(record),
        }
        entry |= {name: value for name, value in fields_of(record).items() if name not in entry}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry, enc_hook=plain).decode()


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


def _short(name: str) -> str:
    return name.removeprefix(f"{ROOT}.")
