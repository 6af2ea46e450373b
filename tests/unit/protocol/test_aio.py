"""The asynchronous client: what it shares with the other, side by side, cancelled, and in its loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
import pytest

from kvtierd.core.errors import RequestError
from kvtierd.core.namespace import Namespace
from kvtierd.protocol import copying
from kvtierd.protocol.aio import AsyncClient
from kvtierd.protocol.connection import Unavailable
from kvtierd.protocol.messages import AnyRequest, Flush
from kvtierd.protocol.service import Session
from kvtierd.testing.fake_daemon import ThreadDaemon
from tests.unit.protocol.conftest import PADDED, blocks_of, keys_of, until

SPACE = Namespace(model="m", geometry=PADDED)
Body = Callable[[AsyncClient], Awaitable[None]]


@pytest.fixture(params=["arena", "frames"])
def run(request: pytest.FixtureRequest, daemon: ThreadDaemon) -> Callable[[Body], None]:
    """Run a coroutine with a client."""

    def go(body: Body) -> None:
        async def main() -> None:
            options = {"timeout_s": 20.0, "transfer_timeout_s": 20.0, "arena": request.param == "arena"}
            async with AsyncClient(daemon.endpoint, **options) as client:  # type: ignore[arg-type]
                await body(client)

        asyncio.run(main())

    return go


def test_every_operation_answers_as_the_sync_client_does(run: Callable[[Body], None]) -> None:
    async def body(client: AsyncClient) -> None:
        handle = await client.register(SPACE)
        keys, blocks = keys_of(SPACE, 5), blocks_of(SPACE, 5)
        assert (await client.lookup(handle, keys)).count == 0
        assert (await client.store(handle, keys, blocks)).stored == 5
        assert (await client.lookup(handle, keys)).count == 5
        assert (await client.lookup_group([handle], [keys])).count == 5
        assert [hit.count for hit in await client.lookup_many(handle, [keys[:n] for n in range(5)])] == [0, 1, 2, 3, 4]
        found = await client.fetch(handle, keys)
        np.testing.assert_array_equal(found.blocks, blocks)
        assert await client.prefetch(handle, keys, wait=True) == 5
        assert await client.pin(handle, keys) == await client.unpin(handle, keys) == 5
        await client.flush()
        assert (await client.stats())["blocks"] == 5
        assert await client.ping() > 0
        assert await client.delete(handle, keys[4:]) == 1
        assert await client.purge(handle) == 4

    run(body)


def test_reservations_and_leases(daemon: ThreadDaemon) -> None:
    async def main() -> None:
        async with AsyncClient(daemon.endpoint, timeout_s=20, transfer_timeout_s=20) as client:
            handle = await client.register(SPACE)
            keys, blocks = keys_of(SPACE, 2), blocks_of(SPACE, 2)
            async with await client.reserve(handle, keys) as reservation:
                for view, block in zip(reservation.views, blocks, strict=True):
                    assert view is not None
                    view.reshape(3, 4096)[:, :384] = block.reshape(3, 384)
                assert await reservation.commit([1], verify=True) == 1
            assert (await client.stats())["slots_free"] == 63
            await client.store(handle, keys, blocks)
            async with await client.acquire(handle, keys) as lease:
                out = np.empty((2, PADDED.block_bytes), np.uint8)
                assert await lease.copy_to(out) == lease.unchanged() == 2
                np.testing.assert_array_equal(out, blocks)
            await client.ping()
            assert not daemon.service.leases

    asyncio.run(main())


def test_operations_run_side_by_side(run: Callable[[Body], None], daemon: ThreadDaemon) -> None:
    event = daemon.call(asyncio.Event)
    daemon.service.before = lambda _, request: wait(event) if isinstance(request, Flush) else None

    async def body(client: AsyncClient) -> None:
        handle = await client.register(SPACE)
        keys = keys_of(SPACE, 3)
        await client.store(handle, keys, blocks_of(SPACE, 3))
        flush = asyncio.create_task(client.flush())
        hits = await asyncio.gather(*(client.lookup(handle, keys[: i % 4]) for i in range(500)))
        assert [hit.count for hit in hits] == [i % 4 for i in range(500)]
        assert not flush.done()
        daemon.call(event.set)
        await flush

    run(body)


async def wait(event: asyncio.Event) -> None:
    await event.wait()


def test_a_cancelled_operation_gives_back_what_it_was_granted(daemon: ThreadDaemon) -> None:
    async def main() -> None:
        async with AsyncClient(daemon.endpoint, timeout_s=20, transfer_timeout_s=20) as client:
            handle = await client.register(SPACE)
            keys = keys_of(SPACE, 2)
            await client.reserve(handle, keys[:1])  # attached
            event = daemon.call(asyncio.Event)
            seen: list[str] = []

            def hold(_: Session, request: AnyRequest) -> Awaitable[None] | None:
                seen.append(type(request).__name__)
                return wait(event) if seen[-1] == "Reserve" else None

            daemon.service.before = hold
            task = asyncio.create_task(client.reserve(handle, keys[1:]))
            while "Reserve" not in seen:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            daemon.call(event.set)
            while "Abort" not in seen:
                await asyncio.sleep(0.001)
            assert client.counters["late_replies"] == 1
            assert (await client.stats())["slots_free"] == 63

    asyncio.run(main())


def test_a_cancelled_copy_has_ended_when_the_call_returns(
    daemon: ThreadDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slowly(*_: object) -> np.ndarray:
        started.set()
        go_on.wait(20)
        ended.set()
        return np.zeros((1, 3), np.uint64)

    monkeypatch.setattr(copying.Copier, "copy_out_and_sum", slowly)

    async def main() -> None:
        async with AsyncClient(daemon.endpoint, timeout_s=20, transfer_timeout_s=20) as client:
            handle = await client.register(SPACE)
            keys = keys_of(SPACE, 1)
            await client.store(handle, keys, blocks_of(SPACE, 1))
            task = asyncio.create_task(client.fetch(handle, keys))
            await asyncio.to_thread(started.wait, 20)
            task.cancel()
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert ended.is_set()
            await client.ping()
            assert not daemon.service.leases

    asyncio.run(main())


def test_errors_of_the_caller_are_raised(run: Callable[[Body], None]) -> None:
    async def body(client: AsyncClient) -> None:
        handle = await client.register(SPACE)
        with pytest.raises(ValueError, match="62 bytes"):
            await client.lookup(handle, np.zeros((2, 31), np.uint8))
        large = Namespace(model="m", geometry=msgspec.structs.replace(PADDED, block_size=4096))
        with pytest.raises(RequestError, match="does not fit in a slot"):
            await client.register(large)

    run(body)


def test_a_client_belongs_to_one_loop(daemon: ThreadDaemon) -> None:
    client = AsyncClient(daemon.endpoint, timeout_s=20)
    asyncio.run(client.ping())
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(client.ping())
    asyncio.run(client.close())


def test_closing_lets_those_who_wait_go(daemon: ThreadDaemon) -> None:
    event = daemon.call(asyncio.Event)
    daemon.service.before = lambda _, request: wait(event) if isinstance(request, Flush) else None

    async def main() -> None:
        client = AsyncClient(daemon.endpoint, timeout_s=20, transfer_timeout_s=20)
        task = asyncio.create_task(client.flush())
        while not daemon.service.requests["Flush"]:
            await asyncio.sleep(0.001)
        await client.close()
        with pytest.raises(Unavailable):
            await task
        with pytest.raises(Unavailable, match="closed"):
            await client.ping()
        await client.close()

    asyncio.run(main())
    daemon.call(event.set)
    until(lambda: daemon.call(lambda: not daemon.server._dispatcher._tasks))
