"""Every error a user can meet, as one row of a table: code, meaning, and whether trying again can help."""

from __future__ import annotations

import enum


class ErrorCode(enum.StrEnum):
    """Codes on the wire (protocol/SPEC.md §6); a code never changes its meaning."""

    BAD_FRAMES = "bad_frames"
    BAD_HEADER = "bad_header"
    BAD_VERSION = "bad_version"
    BAD_ARGUMENT = "bad_argument"
    BATCH_TOO_LARGE = "batch_too_large"
    NO_SESSION = "no_session"
    STALE_EPOCH = "stale_epoch"
    UNKNOWN_NAMESPACE = "unknown_namespace"
    GEOMETRY_MISMATCH = "geometry_mismatch"
    NOT_YOURS = "not_yours"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    NOT_PRESENT = "not_present"
    BUSY = "busy"
    TOO_LARGE = "too_large"
    DEADLINE = "deadline"
    UNAVAILABLE = "unavailable"
    SHUTTING_DOWN = "shutting_down"
    INTERNAL = "internal"


class ExitCode(enum.IntEnum):
    """Exit codes of `kvtierd`, as in sysexits.h where it has one."""

    OK = 0
    USAGE = 64
    NO_DEVICE = 69
    BUG = 70
    IO = 74
    LOCKED = 75
    CONFIG = 78


class KvtierdError(Exception):
    """Base of every error that is somebody's input, a disk or a limit, and not a bug."""


class RequestError(KvtierdError):
    """A request that cannot be served. `code` goes on the wire, the text names the offending value.

    `retry_after_ms` > 0 says that the same request may succeed after that time.
    """

    def __init__(self, code: ErrorCode, message: str, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_ms = retry_after_ms

    def __reduce__(self) -> tuple[type[RequestError], tuple[ErrorCode, str, int]]:
        return type(self), (self.code, str(self), self.retry_after_ms)


class StartupError(KvtierdError):
    """The daemon cannot start; `exit_code` is what its process returns."""

    def __init__(self, exit_code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class StorageError(KvtierdError):
    """The nvme tier cannot do what was asked: the operation, the place and the cause are in the text."""


class CorruptionError(StorageError):
    """Bytes on a medium do not match their checksum; such bytes are never served."""
