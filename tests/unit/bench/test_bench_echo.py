"""The bare echo that the protocol bench measures against."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from kvtierd.bench.echo import echo_process
from kvtierd.bench.echo_client import EchoClient
from kvtierd.bench.rows import BenchError


def test_the_echo_answers_every_request_and_ends_with_its_owner(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/echo"
    with echo_process(endpoint, reply_bytes=77):
        client = EchoClient(endpoint, [b"h" * 60, b"k" * 1024])
        try:
            client.pipelined(100, window=7)
            client.pipelined(3, window=10)
            assert len(client.round_trips_ns(5)) == 5
        finally:
            client.close()


def test_a_reply_has_the_size_that_was_asked_for(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/echo"
    with echo_process(endpoint, reply_bytes=77), zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.connect(endpoint)
        socket.send_multipart([b"header", b"keys"])
        assert [len(frame) for frame in socket.recv_multipart()] == [77]


def test_an_echo_that_cannot_bind_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(BenchError, match="before it was ready"),
        echo_process(f"ipc://{tmp_path}/missing/echo", reply_bytes=1),
    ):
        pass
