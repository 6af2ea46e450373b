"""KV events: vLLM's wire format, in order, without waiting for anybody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.protocol.events import MAX_WAITING_EVENTS, AllBlocksCleared, BlockRemoved, BlockStored, EventPublisher

KEYS = [bytes([i]) * 32 for i in range(3)]


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What a subscriber of vLLM's events declares, with the fields that it had in 2025."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Subscriber:
    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)

    def batch(self) -> tuple[bytes, int, list[object]]:
        topic, number, payload = self._socket.recv_multipart()
        assert len(number) == 8
        return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)

    async def joined(self, publisher: EventPublisher) -> int:
        """Publish until the subscription is known; the next sequence number."""
        while not self._socket.poll(0):
            publisher.cleared()
            await asyncio.sleep(0.01)
        while publisher._waiting:
            await asyncio.sleep(0)
        last = -1
        while last < publisher.batches_total - 1:
            last = self.batch()[1]
        return last + 1

    def close(self) -> None:
        self._context.destroy(linger=0)


def run(folder: Path, body: object, topic: str = "") -> None:
    async def main() -> None:
        publisher = EventPublisher(folder, topic=topic, wall_clock=lambda: 12.5)
        publisher.start()
        subscriber = Subscriber(publisher.endpoint)
        try:
            await body(publisher, subscriber, await subscriber.joined(publisher))  # type: ignore[operator]
        finally:
            subscriber.close()
            publisher.close()
        assert list(folder.iterdir()) == []

    asyncio.run(main())


def test_events_of_one_turn_are_one_batch_in_vllms_layout(folder: Path) -> None:
    async def body(publisher: EventPublisher, subscriber: Subscriber, number: int) -> None:
        publisher.stored(KEYS[:2], None, 16, "host")
        publisher.stored(KEYS[2:], KEYS[1], 16, "host")
        publisher.removed(KEYS[:1], "host")
        publisher.cleared()
        await asyncio.sleep(0)
        topic, got, (ts, events, rank) = subscriber.batch()
        assert (topic, got, ts, rank) == (b"kv", number, 12.5, 0)
        assert events == [
            ["BlockStored", KEYS[:2], None, [], 16, None, "host", None],
            ["BlockStored", KEYS[2:], KEYS[1], [], 16, None, "host", None],
            ["BlockRemoved", KEYS[:1], "host"],
            ["AllBlocksCleared"],
        ]
        publisher.cleared()
        await asyncio.sleep(0)
        assert subscriber.batch()[1] == number + 1

    run(folder, body, topic="kv")


def test_a_turn_with_many_events_is_sent_in_pieces(folder: Path) -> None:
    async def body(publisher: EventPublisher, subscriber: Subscriber, number: int) -> None:
        for _ in range(MAX_WAITING_EVENTS + 1):
            publisher.removed(KEYS, "host")
        await asyncio.sleep(0)
        sizes = [len(subscriber.batch()[2][1]) for _ in range(2)]  # type: ignore[arg-type]
        assert sizes == [MAX_WAITING_EVENTS, 1]
        assert publisher.batches_total == number + 2

    run(folder, body)


def test_a_subscribers_struct_decodes_what_we_send(folder: Path) -> None:
    async def body(publisher: EventPublisher, subscriber: Subscriber, number: int) -> None:
        del number
        publisher.stored(KEYS, None, 16, "nvme")
        await asyncio.sleep(0)
        raw = msgspec.msgpack.encode(subscriber.batch()[2])
        batch = msgspec.msgpack.decode(raw, type=EventBatch)
        (event,) = batch.events
        assert isinstance(event, BlockStored)
        assert (event.block_hashes, event.medium) == (KEYS, "nvme")

    run(folder, body)


def test_nobody_listening_costs_nothing(folder: Path) -> None:
    async def main() -> None:
        publisher = EventPublisher(folder)
        publisher.stored(KEYS, None, 16, "host")  # before the start and after the end: nobody could hear it
        publisher.start()
        assert not publisher.wanted()
        for _ in range(100):
            publisher.stored(KEYS, None, 16, "host")
        publisher.close()
        publisher.close()
        publisher.removed(KEYS, "host")
        assert publisher.batches_total == 1

    asyncio.run(main())


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


def test_a_subscriber_that_comes_back_sees_in_the_numbers_that_it_missed_something(folder: Path) -> None:
    async def main() -> None:
        publisher = EventPublisher(folder)
        publisher.start()
        numbers = []
        for away in ("nothing", "something", "much"):
            subscriber = Subscriber(publisher.endpoint)
            await _until(lambda: bool(publisher._subscriptions))
            publisher.cleared()
            await asyncio.sleep(0)
            numbers.append(subscriber.batch()[1])
            subscriber.close()
            await _until(lambda: not publisher._subscriptions)
            for _ in range({"nothing": 0, "something": 1, "much": 9}[away]):
                assert not publisher.wanted()
        publisher.close()
        first = numbers[0]
        assert numbers == [first, first + 1, first + 3]

    asyncio.run(main())


def test_a_taken_path_is_refused(folder: Path) -> None:
    async def main() -> None:
        first, second = EventPublisher(folder), EventPublisher(folder)
        first.start()
        with pytest.raises(StartupError) as caught:
            second.start()
        assert caught.value.exit_code == ExitCode.LOCKED
        first.close()

    asyncio.run(main())
