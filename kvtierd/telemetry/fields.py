"""What is said in a log line besides its text, in a form that may be written: numbers and names, never payloads."""

from __future__ import annotations

import logging
from typing import Any

import msgspec


def hide_payloads(record: logging.LogRecord) -> bool:
    """Replace raw bytes among a line's arguments by their length: they may be somebody's prompt."""
    if isinstance(record.args, tuple):
        record.args = tuple(_hidden(value) for value in record.args)
    return True


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The record's own fields: what its caller gave in `extra={"fields": {...}}`."""
    return {name: _hidden(value) for name, value in getattr(record, "fields", {}).items()}


def message_of(record: logging.LogRecord) -> str:
    """The record's text, and how many like it were not written before."""
    suppressed = getattr(record, "suppressed", 0)
    suffix = f" ({suppressed} more like this were not written)" if suppressed else ""
    return record.getMessage() + suffix


def as_json_text(value: Any) -> str:
    """A value as JSON; what JSON has no word for as text."""
    return msgspec.json.encode(value, enc_hook=plain).decode()


def plain(value: Any) -> Any:
    """What JSON has no word for: NumPy's scalars as numbers, the rest as text."""
    return value.item() if hasattr(value, "item") else str(value)


def _hidden(value: Any) -> Any:
    # Arrays count as raw bytes, NumPy's scalars (ndim 0) as numbers.
    if isinstance(value, bytes | bytearray | memoryview) or bool(getattr(value, "ndim", 0)):
        return f"<{memoryview(value).nbytes} bytes>"
    return value
