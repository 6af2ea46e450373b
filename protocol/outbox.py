"""Sending on a ROUTER socket without ever waiting, and without copies where the frames allow it (SPEC.md §2)."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable

import zmq

from kvtierd.protocol.service import Answer, Frame
from kvtierd.protocol.sessions import Peer

ZERO_COPY_BYTES = 64 << 10
"""Frames from this size on leave without a copy: below, the bookkeeping costs more than the copy (measured)."""

POLL_S = 0.002
"""How often we look whether ZeroMQ is done with frames that it shares with us; only while there are any."""

_MORE = zmq.NOBLOCK | zmq.SNDMORE


@dataclasses.dataclass(slots=True)
class _Shared:
    """Frames that ZeroMQ still reads."""

    trackers: list[zmq.MessageTracker]
    peer: Peer | None
    nbytes: int
    on_sent: Callable[[], None]


class Outbox:
    """The sending half of the server. A reply that cannot leave at once is dropped and counted."""

    def __init__(self, socket: zmq.Socket[bytes], counters: dict[str, int]) -> None:
        self._send = socket.send
        self._counters = counters
        self._shared: collections.deque[_Shared] = collections.deque()
        self._timer: asyncio.TimerHandle | None = None

    def send(self, rid: bytes, header: bytes, answer: Answer, peer: Peer | None) -> bool:
        """Queue one reply; False when the client is gone or does not read."""
        try:
            self._send(rid, _MORE)
        except zmq.ZMQError:  # EHOSTUNREACH: gone; EAGAIN: its queue is full
            self._counters["replies_dropped_total"] += 1
            _done(answer)
            return False
        if not answer.frames:
            self._send(header, zmq.NOBLOCK)
            self._counters["sent_bytes_total"] += len(header)
            _done(answer)
            return True
        self._send(header, _MORE)
        self._send_frames(answer, peer, len(header))
        return True

    def _send_frames(self, answer: Answer, peer: Peer | None, header_bytes: int) -> None:
        trackers: list[zmq.MessageTracker] = []
        total = shared = 0
        last = len(answer.frames) - 1
        for position, frame in enumerate(answer.frames):
            flags = zmq.NOBLOCK if position == last else _MORE
            nbytes = frame.nbytes if isinstance(frame, memoryview) else len(frame)
            total += nbytes
            if nbytes >= ZERO_COPY_BYTES and (answer.on_sent is not None or isinstance(frame, bytes)):
                shared += nbytes
                trackers.append(self._share(frame, flags))
            else:
                self._send(frame, flags)
        self._counters["sent_bytes_total"] += total + header_bytes
        if trackers:
            self._watch(_Shared(trackers, peer, shared, answer.on_sent or _nothing))
        else:
            _done(answer)

    def _share(self, frame: Frame, flags: int) -> zmq.MessageTracker:
        message = zmq.Frame(frame, track=True, copy=False)
        self._send(message, flags, copy=False)
        tracker: zmq.MessageTracker = message.tracker
        return tracker

    def _watch(self, item: _Shared) -> None:
        if item.peer is not None:
            item.peer.unsent_bytes += item.nbytes
        self._shared.append(item)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(POLL_S, self._poll)

    def _poll(self) -> None:
        self._timer = None
        for _ in range(len(self._shared)):
            item = self._shared.popleft()
            if all(tracker.done for tracker in item.trackers):
                self._release(item)
            else:
                self._shared.append(item)
        if self._shared:
            self._timer = asyncio.get_running_loop().call_later(POLL_S, self._poll)

    @staticmethod
    def _release(item: _Shared) -> None:
        if item.peer is not None:
            item.peer.unsent_bytes -= item.nbytes
        item.on_sent()

    def close(self) -> None:
        """After the socket and its context are closed: ZeroMQ reads nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._shared:
            self._release(self._shared.popleft())


def _nothing() -> None:
    """Nobody waits for the frames."""


def _done(answer: Answer) -> None:
    if answer.on_sent is not None:
        answer.on_sent()
