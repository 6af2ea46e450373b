"""Errors keep what callers and the wire need."""

from __future__ import annotations

import copy

import pytest

from kvtierd.core.errors import (
    CorruptionError,
    ErrorCode,
    ExitCode,
    KvtierdError,
    RequestError,
    StartupError,
    StorageError,
)


def test_a_request_error_keeps_code_text_and_hint() -> None:
    error = RequestError(ErrorCode.BUSY, "no slot for 4 blocks", 50)
    assert (error.code, str(error), error.retry_after_ms) == (ErrorCode.BUSY, "no slot for 4 blocks", 50)


def test_a_request_error_survives_a_copy() -> None:
    error = copy.copy(RequestError(ErrorCode.TOO_LARGE, "9 bytes", 7))
    assert (error.code, str(error), error.retry_after_ms) == (ErrorCode.TOO_LARGE, "9 bytes", 7)


def test_a_startup_error_carries_the_exit_code() -> None:
    error = StartupError(ExitCode.LOCKED, "another daemon holds it")
    assert (int(error.exit_code), str(error)) == (75, "another daemon holds it")


def test_corruption_is_a_storage_error_and_all_are_ours() -> None:
    assert issubclass(CorruptionError, StorageError)
    assert all(issubclass(kind, KvtierdError) for kind in (RequestError, StartupError, StorageError))


def test_codes_on_the_wire_do_not_change() -> None:
    assert " ".join(code.value for code in ErrorCode) == (
        "bad_frames bad_header bad_version bad_argument batch_too_large no_session stale_epoch unknown_namespace "
        "geometry_mismatch not_yours checksum_mismatch not_present busy too_large deadline unavailable shutting_down "
        "internal"
    )


@pytest.mark.parametrize(("name", "code"), [("OK", 0), ("USAGE", 64), ("IO", 74), ("LOCKED", 75), ("CONFIG", 78)])
def test_exit_codes_are_those_of_sysexits(name: str, code: int) -> None:
    assert ExitCode[name] == code
