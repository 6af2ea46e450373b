"""Hears the daemon's KV events in a thread (protocol/SPEC.md §10). No engine in here."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec
import zmq

from kvtierd.protocol.endpoint import EVENTS_NAME, path_of
from kvtierd.protocol.events import QUEUE_BATCHES, AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

_log = logging.getLogger("kvtierd")

POLL_MS = 200


class Hearer(Protocol):
    """Who is told, in the events' order."""

    def stored(self, keys: Iterable[bytes]) -> None:
        """The daemon has these now."""
        ...

    def removed(self, keys: Iterable[bytes]) -> None:
        """The daemon no longer has these."""
        ...

    def doubt(self) -> None:
        """Something was missed, or the daemon is another one than before."""
        ...


class DaemonEvents:
    """Subscribes beside the daemon's socket; a daemon that is not there is waited for.

    `life` names the life of the daemon that a client talks to (its epoch), 0 before the first: another one may have
    lost blocks without having told anybody. Raises ValueError for an endpoint of another machine, which has no events.
    """

    def __init__(self, endpoint: str, hearer: Hearer, life: Callable[[], int]) -> None:
        self._endpoint = f"ipc://{path_of(endpoint).with_name(EVENTS_NAME)}"
        self._hearer = hearer
        self._life = life
        self._epoch = 0
        self._expected: int | None = None
        self._decode = msgspec.msgpack.Decoder(EventBatch).decode
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtierd-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.RCVHWM, QUEUE_BATCHES)
            socket.setsockopt(zmq.LINGER, 0)
            socket.subscribe(b"")
            socket.connect(self._endpoint)
            while not self._ended.is_set():
                self._look()
                if socket.poll(POLL_MS):
                    self._hear(socket.recv_multipart())

    def _look(self) -> None:
        """Whether the daemon is the one that it was."""
        epoch = self._life()
        if epoch != self._epoch:
            if self._epoch:
                self._hearer.doubt()
            self._epoch = epoch

    def _hear(self, frames: list[bytes]) -> None:
        try:
            _, number, payload = frames
            batch = self._decode(payload)
        except (ValueError, msgspec.MsgspecError) as error:
            _log.warning("kvtierd: an event of the daemon is not understood: %s", error)
            self._hearer.doubt()
            return
        count = int.from_bytes(number, "big")
        if self._expected is not None and count != self._expected:
            self._hearer.doubt()
        self._expected = count + 1
        for event in batch.events:
            self._tell(event)

    def _tell(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        match event:
            case BlockStored():
                self._hearer.stored(event.block_hashes)
            case BlockRemoved():
                self._hearer.removed(event.block_hashes)
            case AllBlocksCleared():
                self._hearer.doubt()
