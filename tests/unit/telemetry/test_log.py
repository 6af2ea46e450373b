from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvtierd.telemetry import log


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def lines() -> Iterator[Callable[..., io.StringIO]]:
    """Configure logging to a buffer; the root of our loggers is put back afterwards."""
    logger = logging.getLogger(log.ROOT)
    before = logger.handlers, logger.level, logger.propagate

    def configure(form: str, level: str = "info", terminal: bool = False) -> io.StringIO:
        stream = _Terminal() if terminal else io.StringIO()
        log.configure(level, form, stream)
        return stream

    yield configure
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_json_line_holds_message_and_fields(lines) -> None:
    stream = lines("json")
    logging.getLogger("kvtierd.tiers").warning("moved %d blocks", 3, extra={"fields": {"tier": "host", "n": 2}})
    entry = json.loads(stream.getvalue())
    assert entry["message"] == "moved 3 blocks"
    assert (entry["level"], entry["logger"], entry["tier"], entry["n"]) == ("warning", "kvtierd.tiers", "host", 2)
    assert entry["time"].endswith("+00:00")


@pytest.mark.parametrize(("terminal", "first"), [(True, "0123456789"), (False, "{")])
def test_auto_is_text_on_a_terminal_and_json_elsewhere(lines, terminal: bool, first: str) -> None:
    stream = lines("auto", terminal=terminal)
    logging.getLogger("kvtierd.x").info("hello")
    assert stream.getvalue()[0] in first


def test_text_line_names_level_logger_and_fields(lines) -> None:
    stream = lines("text")
    logging.getLogger("kvtierd.daemon.app").error("no room", extra={"fields": {"pid": 7}})
    assert stream.getvalue().split(maxsplit=1)[1] == "ERROR   daemon.app: no room pid=7\n"


@pytest.mark.parametrize("form", ["text", "json"])
def test_traceback_is_kept(lines, form: str) -> None:
    stream = lines(form)
    try:
        raise KeyError("lost")
    except KeyError:
        logging.getLogger("kvtierd.x").exception("failed")
    assert "KeyError: 'lost'" in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 1 or form == "text"


@pytest.mark.parametrize("payload", [b"secret", bytearray(b"secret"), memoryview(b"secret"), np.zeros(6, np.uint8)])
@pytest.mark.parametrize("form", ["text", "json"])
def test_payload_is_never_written(lines, form: str, payload: object) -> None:
    stream = lines(form)
    logging.getLogger("kvtierd.x").info("got %s", payload, extra={"fields": {"data": payload}})
    assert "secret" not in stream.getvalue()
    assert stream.getvalue().count("<6 bytes>") == 2


@pytest.mark.parametrize(("form", "tail"), [("text", "n=7\n"), ("json", '"n":7}\n')])
def test_numbers_of_numpy_are_numbers(lines, form: str, tail: str) -> None:
    stream = lines(form)
    logging.getLogger("kvtierd.x").info("moved %d", np.int64(5), extra={"fields": {"n": np.uint64(7)}})
    assert "moved 5" in stream.getvalue()
    assert stream.getvalue().endswith(tail)


def test_lines_below_the_level_are_not_written(lines) -> None:
    stream = lines("text", level="warning")
    logging.getLogger("kvtierd.x").info("quiet")
    assert stream.getvalue() == ""


def test_repeated_line_is_limited_and_the_rest_counted() -> None:
    now_s = [0.0]
    limit = log.RateLimit(lambda: now_s[0])

    def written(message: str) -> logging.LogRecord | None:
        record = logging.makeLogRecord({"name": "kvtierd.x", "levelno": 30, "levelname": "WARNING", "msg": message})
        return record if limit.filter(record) else None

    assert sum(written("disk slow") is not None for _ in range(100)) == log.BURST_LINES
    assert written("another line") is not None
    now_s[0] = log.BURST_WINDOW_S
    later = written("disk slow")
    assert later is not None
    text = log.TextFormatter().format(later)
    assert text.endswith(f"disk slow ({100 - log.BURST_LINES} more like this were not written)")


def test_limiter_remembers_a_bounded_number_of_templates() -> None:
    limit = log.RateLimit(lambda: 0.0)
    for i in range(3 * log.MAX_TEMPLATES):
        limit.filter(logging.makeLogRecord({"name": "kvtierd.x", "levelno": 20, "msg": f"line {i}"}))
    assert len(limit._windows) <= log.MAX_TEMPLATES
