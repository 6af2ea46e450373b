"""Between structs and frames: one encoder, one decoder each way, and the checks that need no state (SPEC.md §2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.keys import KEY_BYTES
from kvtierd.protocol.messages import (
    MAX_ATTEND_LAYERS,
    MAX_BATCH,
    MAX_HEADER_BYTES,
    Abort,
    Acquire,
    AcquirePart,
    AnyReply,
    AnyRequest,
    Attend,
    CloseSequence,
    Commit,
    Delete,
    Extend,
    Flush,
    Get,
    Hello,
    Lookup,
    OpenSequence,
    Pin,
    Prefetch,
    Purge,
    Put,
    RegisterNamespace,
    Release,
    Reserve,
    Reshape,
    Stats,
    Unpin,
)

SUM_BYTES = 8
MAX_ERROR_TEXT = 400
"""Characters of an error's text on the wire: an offending value may be long."""

encode = msgspec.msgpack.Encoder().encode
"""Struct to header frame; one encoder serves every thread, it keeps no state between calls."""

_decode_request = msgspec.msgpack.Decoder(AnyRequest).decode
decode_reply: Callable[[bytes | memoryview], AnyReply] = msgspec.msgpack.Decoder(AnyReply).decode
"""Header frame to reply; raises msgspec.MsgspecError for what no daemon of ours sends."""


class _Envelope(msgspec.Struct):
    """What can still be read of a request whose fields are wrong."""

    id: int = 0
    op: str = ""


_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode

Buffer = bytes | bytearray | memoryview


class HeaderError(RequestError):
    """A header that is no request; `request_id` is 0 where it could not be read."""

    def __init__(self, code: ErrorCode, message: str, request_id: int = 0) -> None:
        super().__init__(code, message)
        self.request_id = request_id


def decode_request(header: Buffer) -> AnyRequest:
    """Read a header frame. Raises HeaderError naming what is wrong with it."""
    if len(header) > MAX_HEADER_BYTES:
        message = f"the header has {len(header)} bytes; the limit is {MAX_HEADER_BYTES}: bulk data goes into frames"
        raise HeaderError(ErrorCode.BAD_HEADER, message)
    try:
        return _decode_request(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _explain(header, error) from None


def _explain(header: Buffer, error: Exception) -> HeaderError:
    try:
        envelope = _decode_envelope(header)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return HeaderError(
            ErrorCode.BAD_HEADER, clip(f"the header is no MessagePack map with an id and an op: {error}")
        )
    if envelope.op not in OPERATIONS:
        known = ", ".join(OPERATIONS)
        text = f"unknown operation {envelope.op[:40]!r}; this daemon knows {known}"
        return HeaderError(ErrorCode.BAD_HEADER, clip(text), envelope.id)
    return HeaderError(ErrorCode.BAD_ARGUMENT, clip(f"{envelope.op}: {error}"), envelope.id)


def clip(text: str) -> str:
    """Bound a text that may quote what a client sent."""
    return text if len(text) <= MAX_ERROR_TEXT else text[: MAX_ERROR_TEXT - 1] + "…"


def check_frames(request: AnyRequest, frames: Sequence[memoryview]) -> None:
    """Compare the frames with what the operation wants. Raises RequestError naming the frame that is wrong."""
    _CHECKS[type(request)](request, frames)


def _bad_frames(request: AnyRequest, wanted: str, frames: Sequence[memoryview]) -> RequestError:
    op = type(request).__struct_config__.tag
    return RequestError(ErrorCode.BAD_FRAMES, f"{op} wants {wanted}; {len(frames)} frames came behind its header")


def _check_keys(frame: memoryview, position: int) -> int:
    if frame.nbytes % KEY_BYTES:
        message = f"frame {position} has {frame.nbytes} bytes of keys, which is no multiple of {KEY_BYTES}"
        raise RequestError(ErrorCode.BAD_FRAMES, message)
    return frame.nbytes // KEY_BYTES


def _check_batch(count: int) -> None:
    if count > MAX_BATCH:
        message = f"{count} blocks in one request; the limit is {MAX_BATCH}: split the request"
        raise RequestError(ErrorCode.BATCH_TOO_LARGE, message)


def _no_frames(request: AnyRequest, frames: Sequence[memoryview]) -> None:
    if frames:
        raise _bad_frames(request, "no frames", frames)


def _one_of_keys(request: AnyRequest, frames: Sequence[memoryview]) -> None:
    if len(frames) != 1:
        raise _bad_frames(request, "one frame of keys", frames)
    _check_batch(_check_keys(frames[0], 1))


def _check_lookup(request: Lookup, frames: Sequence[memoryview]) -> None:
    wanted = len(request.namespaces)
    if not wanted:
        raise RequestError(ErrorCode.BAD_ARGUMENT, "lookup names no namespace")
    if len(frames) != wanted:
        raise _bad_frames(request, f"one frame of keys for each of its {wanted} namespaces", frames)
    first = _check_keys(frames[0], 1)
    for position, frame in enumerate(frames[1:], 2):
        if (count := _check_keys(frame, position)) != first:
            message = f"frame {position} has {count} keys and frame 1 has {first}; all must have the same count"
            raise RequestError(ErrorCode.BAD_FRAMES, message)
    _check_batch(first * wanted)


def _check_commit(request: Commit, frames: Sequence[memoryview]) -> None:
    if len(frames) != 2:
        raise _bad_frames(request, "layer sums and block sums", frames)
    for position, frame in enumerate(frames, 1):
        if frame.nbytes % SUM_BYTES:
            message = f"frame {position} has {frame.nbytes} bytes of sums, which is no multiple of {SUM_BYTES}"
            raise RequestError(ErrorCode.BAD_FRAMES, message)
    count = frames[1].nbytes // SUM_BYTES
    _check_batch(count)
    if request.index is not None and len(request.index) != count:
        message = f"commit names {len(request.index)} blocks but brings {count} block sums"
        raise RequestError(ErrorCode.BAD_FRAMES, message)
    if count and frames[0].nbytes % (count * SUM_BYTES):
        message = f"{frames[0].nbytes} bytes of layer sums do not divide among {count} blocks"
        raise RequestError(ErrorCode.BAD_FRAMES, message)


def _check_put(request: Put, frames: Sequence[memoryview]) -> None:
    if len(frames) < 2:
        raise _bad_frames(request, "keys, block sums and one payload per block", frames)
    count = _check_keys(frames[0], 1)
    _check_batch(count)
    if frames[1].nbytes != count * SUM_BYTES:
        message = f"frame 2 has {frames[1].nbytes} bytes of block sums; {count} keys want {count * SUM_BYTES}"
        raise RequestError(ErrorCode.BAD_FRAMES, message)
    if len(frames) != 2 + count:
        raise _bad_frames(request, f"keys, block sums and {count} payloads", frames)


def _check_reshape(request: Reshape, frames: Sequence[memoryview]) -> None:
    _one_of_keys(request, frames)
    _check_batch(len(request.parts))


def _check_release(request: Release, frames: Sequence[memoryview]) -> None:
    _no_frames(request, frames)
    _check_batch(len(request.leases))


def _check_attend(request: Attend, frames: Sequence[memoryview]) -> None:
    layers = len(request.layers)
    if layers > MAX_ATTEND_LAYERS:
        raise RequestError(
            ErrorCode.BATCH_TOO_LARGE, f"{layers} layers in one request; the limit is {MAX_ATTEND_LAYERS}"
        )
    wanted = layers * (2 if request.sinks else 1)
    if len(frames) != wanted:
        raise _bad_frames(request, f"{wanted} frames for its {layers} layers", frames)


def _check_close(request: CloseSequence, frames: Sequence[memoryview]) -> None:
    _no_frames(request, frames)
    _check_batch(len(request.sequences))


_CHECKS: dict[type[msgspec.Struct], Callable[..., None]] = {
    Hello: _no_frames,
    RegisterNamespace: _no_frames,
    Lookup: _check_lookup,
    Reserve: _one_of_keys,
    Commit: _check_commit,
    Abort: _no_frames,
    Acquire: _one_of_keys,
    AcquirePart: _one_of_keys,
    Release: _check_release,
    Put: _check_put,
    Get: _one_of_keys,
    Prefetch: _one_of_keys,
    Pin: _one_of_keys,
    Unpin: _one_of_keys,
    Delete: _one_of_keys,
    Reshape: _check_reshape,
    Purge: _no_frames,
    Flush: _no_frames,
    Stats: _no_frames,
    OpenSequence: _one_of_keys,
    Extend: _one_of_keys,
    Attend: _check_attend,
    CloseSequence: _check_close,
}
OPERATIONS: tuple[str, ...] = tuple(str(kind.__struct_config__.tag) for kind in _CHECKS)
"""Every operation by its name on the wire."""
