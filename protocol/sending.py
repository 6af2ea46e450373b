"""Sending a client's message without ever waiting, and without copies where the frames are large."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from kvtierd.protocol.service import Frame

ZERO_COPY_BYTES = 128 << 10
"""As in the server: sharing memory with ZeroMQ is dearer than a small copy."""

# Plain integers: combining enumeration members costs a microsecond a frame.
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


def send_message(socket: zmq.Socket[bytes], header: bytes, frames: Sequence[Frame]) -> bool:
    """Send a header and raw frames; False where nobody is there to take them, or the queue is full."""
    try:
        socket.send(header, _MORE if frames else _LAST)
        last = len(frames) - 1
        for position, frame in enumerate(frames):
            nbytes = frame.nbytes if isinstance(frame, memoryview) else len(frame)
            # Large payload is shared. The caller may change it after a timeout, while ZeroMQ still sends: then its
            # checksum does not match, and the daemon stores nothing of the request.
            socket.send(frame, _LAST if position == last else _MORE, copy=nbytes < ZERO_COPY_BYTES)
    except zmq.Again:
        return False
    return True
