"""A client that says anything: bare frames on a DEALER, for tests of what the server makes of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypeVar

import zmq

from kvtierd.protocol.codec import decode_reply, encode
from kvtierd.protocol.curve import CurveKeys
from kvtierd.protocol.messages import AnyReply, AnyRequest, ErrorReply, Hello, HelloReply, Stats

R = TypeVar("R", bound=AnyReply)
Frame = bytes | bytearray | memoryview


class RawClient:
    """`ask` fills in id, epoch and a deadline; `send` sends frames as they are. Waits at most 20 s for a reply."""

    def __init__(self, endpoint: str, *, routing_id: bytes = b"", curve: CurveKeys | None = None) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        if routing_id:
            self.socket.setsockopt(zmq.ROUTING_ID, routing_id)
        if curve is not None:
            curve.secure(self.socket)
        self.socket.connect(endpoint)
        self.epoch = 0
        self.token = b""
        self._next_id = 1

    def send(self, *frames: Frame) -> None:
        """Send a message as it is."""
        self.socket.send_multipart(frames)

    def receive(self) -> tuple[AnyReply, list[bytes]]:
        """The next reply and its raw frames."""
        header, *frames = self.socket.recv_multipart()
        return decode_reply(header), frames

    def silent(self, seconds: float = 0.1) -> bool:
        """Whether no reply comes for a while."""
        return not self.socket.poll(int(seconds * 1000))

    def post(self, request: AnyRequest, frames: Sequence[Frame] = ()) -> int:
        """Send a request of this session; its id."""
        request.id = self._next_id
        self._next_id += 1
        request.epoch = request.epoch or self.epoch
        request.deadline_ns = request.deadline_ns or time.monotonic_ns() + 20_000_000_000
        self.send(encode(request), *frames)
        return request.id

    def ask(self, request: AnyRequest, kind: type[R], frames: Sequence[Frame] = ()) -> tuple[R, list[bytes]]:
        """Send a request and return its reply, which must be of a kind."""
        number = self.post(request, frames)
        reply, got = self.receive()
        assert reply.id == number, f"reply {reply.id} to request {number}"
        assert isinstance(reply, kind), reply
        return reply, got

    def refused(self, request: AnyRequest, frames: Sequence[Frame] = ()) -> ErrorReply:
        """Send a request that must be answered with an error."""
        return self.ask(request, ErrorReply, frames)[0]

    def refused_raw(self, *frames: Frame) -> ErrorReply:
        """Send a message that must be answered with an error."""
        self.send(*frames)
        reply, _ = self.receive()
        assert isinstance(reply, ErrorReply), reply
        return reply

    def hello(self, resume: bytes = b"") -> HelloReply:
        """Open a session."""
        reply, _ = self.ask(Hello(id=0, client="raw", resume=resume), HelloReply)
        self.epoch, self.token = reply.epoch, reply.token
        return reply

    def alive(self) -> bool:
        """Whether the server still answers this session."""
        self.post(Stats(id=0))
        return not isinstance(self.receive()[0], ErrorReply)

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
