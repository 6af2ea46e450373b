"""The reference for the protocol: a bare pyzmq asyncio ROUTER that answers every request with the same frames.

Run as a process of its own (`python -m kvtierd.bench.echo ENDPOINT REPLY_BYTES`), so that it has an interpreter and a
loop to itself, as the daemon has. It ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import zmq
import zmq.asyncio

from kvtierd.bench.rows import BenchError


async def serve(endpoint: str, reply: bytes) -> None:
    """Answer until standard input ends. Nothing is parsed: this is what the sockets and the loop alone cost."""
    loop = asyncio.get_running_loop()
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(endpoint)
    done = asyncio.Event()

    def owner_spoke_or_left() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            done.set()

    loop.add_reader(sys.stdin.fileno(), owner_spoke_or_left)
    echo = asyncio.create_task(_answer(socket, reply))
    print("ready", flush=True)
    await done.wait()
    echo.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await echo
    loop.remove_reader(sys.stdin.fileno())
    context.destroy(linger=0)


async def _answer(socket: zmq.asyncio.Socket, reply: bytes) -> None:
    while True:
        frames = await socket.recv_multipart()
        await socket.send_multipart([frames[0], reply])


@contextlib.contextmanager
def echo_process(endpoint: str, reply_bytes: int) -> Iterator[None]:
    """Run the echo in a process of its own for the length of the block."""
    command = [sys.executable, "-m", "kvtierd.bench.echo", endpoint, str(reply_bytes)]
    # The child must find this very package, also where it runs uninstalled from another folder.
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise BenchError(f"the echo process ended with {process.wait(10)} before it was ready")
        yield
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(10)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], bytes(int(sys.argv[2]))))
