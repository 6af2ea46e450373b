"""Sending on a ROUTER socket without ever waiting, and without copies where the frames allow it (SPEC.md §2)."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
from collections.abc import Callable

import zmq

from kvtierd.protocol.codec import encode
from kvtierd.protocol.messages import OkReply
from kvtierd.protocol.service import Answer, Frame
from kvtierd.protocol.sessions import Peer

log = logging.getLogger(__name__)

ZERO_COPY_BYTES = 16 << 10
"""Frames from this size on are shared with ZeroMQ and counted until it is done with them. Sharing costs 8 to 15 µs at
any size; a copy 5 µs for 64 KiB, and over 45 µs from 128 KiB on, where the allocator maps fresh pages. What is not
counted is bounded only by the high-water mark, so the size is small: a client that never reads must cost little."""

POLL_S, POLL_MAX_S = 0.001, 0.064
"""How often we look whether ZeroMQ is done with frames that it shares with us: only while there are any, and less and
less often while their client does not read."""

_NOTHING = encode(OkReply(id=0))
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


@dataclasses.dataclass(slots=True)
class _Shared:
    """Frames that ZeroMQ still reads."""

    trackers: list[zmq.MessageTracker]
    peer: Peer | None
    nbytes: int
    on_sent: Callable[[], None]


class Outbox:
    """The sending half of the server. A reply that cannot leave at once is dropped and counted.

    `after_send` is called after each attempt, also one that failed: either may swallow the edge that told of a request
    to read, and with nobody else at work that request would wait until its client gives up.
    """

    def __init__(self, socket: zmq.Socket[bytes], counters: dict[str, int], after_send: Callable[[], None]) -> None:
        self._send = socket.send
        self._counters = counters
        self._after_send = after_send
        self._gone: bytes | None = None
        self._shared: collections.deque[_Shared] = collections.deque()
        self._timer: asyncio.TimerHandle | None = None
        self._poll_s = POLL_S

    def send(self, rid: bytes, header: bytes, answer: Answer, peer: Peer | None) -> bool:
        """Queue one reply; False when the client is gone or does not read.

        Raises TypeError or ValueError, before anything is sent, for a frame that is no contiguous memory.
        """
        frames = [_contiguous(frame) for frame in answer.frames]
        try:
            self._send(rid, _MORE)
        except zmq.ZMQError as error:  # EHOSTUNREACH: gone; EAGAIN: its queue is full
            self._gone = rid if error.errno == zmq.EHOSTUNREACH else None
            self.drop(answer)
            self._after_send()
            return False
        if frames:
            self._send(header, _MORE)
            self._send_frames(frames, answer, peer)
        else:
            self._send(header, _LAST)
            _done(answer)
        self._counters["sent_bytes_total"] += len(header)
        self._after_send()
        return True

    def drop(self, answer: Answer) -> None:
        """Take back the frames of an answer that nobody waits for any more."""
        self._counters["replies_dropped_total"] += 1
        _done(answer)

    def is_reachable(self, rid: bytes) -> bool:
        """Whether a routing id still has a connection, found by sending it an answer to nothing (id 0)."""
        self._gone = None
        self.send(rid, _NOTHING, Answer(OkReply(id=0)), None)
        return not self.is_gone(rid)

    def is_gone(self, rid: bytes) -> bool:
        """Whether the last reply that could not be sent was for this client, and its connection is gone."""
        return self._gone == rid

    def _send_frames(self, frames: list[memoryview], answer: Answer, peer: Peer | None) -> None:
        trackers: list[zmq.MessageTracker] = []
        total = shared = 0
        keep = answer.on_sent is not None
        last = len(frames) - 1
        for position, frame in enumerate(frames):
            flags = _LAST if position == last else _MORE
            nbytes = frame.nbytes
            total += nbytes
            if nbytes < ZERO_COPY_BYTES:
                self._send(frame, flags)
                continue
            shared += nbytes
            trackers.append(self._share(frame if keep else bytes(frame), flags))
        self._counters["sent_bytes_total"] += total
        if trackers:
            self._watch(_Shared(trackers, peer, shared, answer.on_sent or _nothing))
        else:
            _done(answer)

    def _share(self, frame: memoryview | bytes, flags: int) -> zmq.MessageTracker:
        message = zmq.Frame(frame, track=True, copy=False)
        self._send(message, flags, copy=False)
        tracker: zmq.MessageTracker = message.tracker
        return tracker

    def _watch(self, item: _Shared) -> None:
        if item.peer is not None:
            item.peer.unsent_bytes += item.nbytes
        self._shared.append(item)
        if self._timer is not None and self._poll_s > POLL_S:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._arm(POLL_S)

    def _arm(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._timer = asyncio.get_running_loop().call_later(poll_s, self._poll)

    def _poll(self) -> None:
        before = len(self._shared)
        for _ in range(before):
            item = self._shared.popleft()
            if all(tracker.done for tracker in item.trackers):
                self._release(item)
            else:
                self._shared.append(item)
        self._timer = None
        if self._shared:
            self._arm(POLL_S if len(self._shared) < before else min(2 * self._poll_s, POLL_MAX_S))

    @staticmethod
    def _release(item: _Shared) -> None:
        if item.peer is not None:
            item.peer.unsent_bytes -= item.nbytes
        _call(item.on_sent)

    def close(self) -> None:
        """After the socket and its context are closed: ZeroMQ reads nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._shared:
            self._release(self._shared.popleft())


def _contiguous(frame: Frame) -> memoryview:
    view = memoryview(frame)
    if not view.c_contiguous:
        raise ValueError("a frame of an answer is not contiguous")
    return view


def _nothing() -> None:
    """Nobody waits for the frames."""


def _done(answer: Answer) -> None:
    if answer.on_sent is not None:
        _call(answer.on_sent)


def _call(on_sent: Callable[[], None]) -> None:
    try:
        on_sent()
    except Exception:
        log.exception("the service failed to take back the frames of an answer")
