"""The client side of the echo: what a lookup client does with its socket, and nothing else."""

from __future__ import annotations

import time

import zmq

from kvtierd.bench.rows import BenchError

_TIMEOUT_MS = 10_000


class EchoClient:
    """A DEALER that sends the same frames again and again and counts what comes back.

    Nothing is encoded, decoded or paired: this is what the sockets of one synchronous client cost.
    """

    def __init__(self, endpoint: str, request: list[bytes]) -> None:
        self._request = request
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, _TIMEOUT_MS)
        self._socket.setsockopt(zmq.SNDTIMEO, _TIMEOUT_MS)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def pipelined(self, count: int, window: int) -> None:
        """`count` requests, at most `window` of them unanswered at a time. Raises BenchError when answers stop."""
        send, receive, request = self._socket.send_multipart, self._socket.recv_multipart, self._request
        try:
            for _ in range(min(window, count)):
                send(request)
            for _ in range(max(0, count - window)):
                receive()
                send(request)
            for _ in range(min(window, count)):
                receive()
        except zmq.Again:
            raise BenchError(f"the echo did not answer within {_TIMEOUT_MS} ms") from None

    def round_trips_ns(self, count: int) -> list[int]:
        """Time of each of `count` requests, one at a time, in nanoseconds."""
        taken = []
        for _ in range(count):
            begin = time.perf_counter_ns()
            self.pipelined(1, 1)
            taken.append(time.perf_counter_ns() - begin)
        return taken

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)
