"""KV events on a PUB socket, in the wire format of vLLM's engines, so that their routers can follow us (SPEC.md §10).

One message is three frames: topic, sequence number as u64 big endian, and a MessagePack batch of tagged arrays. The
layout follows vllm/distributed/kv_events.py of vLLM up to 0.11; token ids are left out, because we never see them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.protocol.endpoint import EVENTS_NAME, prepare_path, set_mode

MAX_WAITING_EVENTS = 1024
"""A turn of the loop that makes more is sent in several batches."""
QUEUE_BATCHES = 10_000
"""A subscriber that lags by more loses batches, which it sees in the sequence numbers."""


class KVEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Base of the events: an array whose first item is the struct's name."""


class BlockStored(KVEvent, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Blocks became visible. Hashes are block keys (32 bytes)."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(KVEvent, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Blocks are no longer to be had from this medium."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(KVEvent, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Nothing is left."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events in their order; `ts` is the wall clock in seconds since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class EventPublisher:
    """Publishes what the service reports, gathered over one turn of the loop; never waits for a subscriber.

    Who reports asks `wanted` first: to gather keys and to encode them costs a tenth of a store.
    """

    def __init__(self, folder: Path, *, topic: str = "", wall_clock: Callable[[], float] = time.time) -> None:
        self.path = Path(folder) / EVENTS_NAME
        self.endpoint = f"ipc://{self.path}"
        self.batches_total = 0
        """Batches sent; their numbers run ahead of it where nobody listened."""
        self._number = 0
        self._unheard = False
        """Whether something happened since the last batch while nobody listened."""
        self._subscriptions: set[bytes] = set()
        self._topic = topic.encode()
        self._wall_clock = wall_clock
        self._encode = msgspec.msgpack.Encoder().encode
        self._waiting: list[Any] = []
        self._socket: zmq.Socket[bytes] | None = None
        self._flush_handle: asyncio.Handle | None = None

    def start(self, *, replace_stale: bool = False) -> None:
        """Bind. Raises StartupError when the path is taken or cannot be bound."""
        prepare_path(self.path, replace_stale=replace_stale)
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        socket = self._context.socket(zmq.XPUB)  # a PUB socket that says who subscribes
        socket.setsockopt(zmq.SNDHWM, QUEUE_BATCHES)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(self.endpoint)
            set_mode(self.path)
        except (zmq.ZMQError, OSError) as error:
            socket.close(0)
            self._context.term()
            raise StartupError(ExitCode.IO, f"cannot bind {self.endpoint}: {error}") from error
        self._socket = socket
        self._loop.add_reader(socket.fileno(), self._hear)

    def wanted(self) -> bool:
        """Whether anybody is to be told of what is happening now. If nobody is, a gap in the numbers of batches says to
        those who come back that they missed something."""
        if self._subscriptions:
            return True
        self._unheard = True
        return False

    def close(self) -> None:
        """Send what waits and close; a second call does nothing."""
        if self._socket is None:
            return
        self._flush()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self.path.unlink(missing_ok=True)  # ZeroMQ removes only paths that it made up itself
        self._socket = None
        self._context.term()

    def stored(self, keys: Sequence[bytes], parent: bytes | None, block_size: int, medium: str) -> None:
        """Blocks became visible."""
        self._add(
            BlockStored(
                block_hashes=list(keys),
                parent_block_hash=parent,
                token_ids=[],
                block_size=block_size,
                lora_id=None,
                medium=medium,
                lora_name=None,
            )
        )

    def removed(self, keys: Sequence[bytes], medium: str) -> None:
        """Blocks are gone."""
        self._add(BlockRemoved(block_hashes=list(keys), medium=medium))

    def cleared(self) -> None:
        """Everything is gone."""
        self._add(AllBlocksCleared())

    def _add(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if self._socket is None:
            return
        self._waiting.append(event)
        if len(self._waiting) >= MAX_WAITING_EVENTS:
            self._flush()
        elif self._flush_handle is None:
            self._flush_handle = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        if not self._waiting or self._socket is None:
            return
        batch = EventBatch(ts=self._wall_clock(), events=self._waiting, data_parallel_rank=0)
        self._number += self._unheard
        number = self._number.to_bytes(8, "big")
        self._unheard = False
        self._number += 1
        self.batches_total += 1
        self._waiting = []
        self._socket.send_multipart((self._topic, number, self._encode(batch)), zmq.NOBLOCK)
        self._hear()  # the descriptor tells only what is new since the socket was last used

    def _hear(self) -> None:
        """Note who subscribes, or does no more; the socket tells the first of each topic, and the last."""
        socket = self._socket
        while socket is not None and socket.poll(0, zmq.POLLIN):
            said = socket.recv(zmq.NOBLOCK)
            if said[:1] == b"\x01":
                self._subscriptions.add(said[1:])
            elif said[:1] == b"\x00":
                self._subscriptions.discard(said[1:])
