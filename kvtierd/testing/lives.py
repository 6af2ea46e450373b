"""Lives of a tier manager that follow each other: what one leaves in its host tier, the next begins with."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ParamSpec

import numpy as np

from kvtierd.core.checksum import layer_sums
from kvtierd.core.keys import Keys
from kvtierd.protocol import messages as m
from kvtierd.protocol.service import Session
from kvtierd.storage.interface import BlockStore
from kvtierd.testing.held_files import HeldFiles
from kvtierd.testing.rig import SHAPE, Rig, pattern, small_settings
from kvtierd.tiers.warm_host import Kept

P = ParamSpec("P")


def on_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Make a test of one that runs on a loop."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def all_of_it() -> None:
            await test(*args, **kwargs)

        asyncio.run(all_of_it())

    return run


async def until(holds: Callable[[], bool]) -> None:
    """Poll until something holds; TimeoutError where it never does."""
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def life(
    files: HeldFiles, store: BlockStore | None = None, **host: Any
) -> AsyncIterator[tuple[Rig, Session, int]]:
    """A life that begins with what is held, and one client of it: (rig, session, namespace)."""
    async with Rig(small_settings(**host), store, Kept(files, files.passed())) as rig:
        session = rig.session()
        yield rig, session, await rig.register(session)


async def fetched(rig: Rig, session: Session, namespace: int, keys: Keys) -> int:
    """Length of the prefix that is leased; its bytes, sums and generations must be right."""
    answer = await rig.call(session, m.Acquire(id=1, namespace=namespace), keys.tobytes())
    assert isinstance(answer.reply, m.AcquireReply)
    count = answer.reply.count
    descriptors = np.frombuffer(answer.frames[0], m.SLOT_DTYPE)
    sums = np.frombuffer(answer.frames[1], "<u8").reshape(count, SHAPE.layers)
    for i in range(count):
        assert (rig.read(descriptors[i]) == pattern(keys[i], SHAPE)).all(), f"block {i} has other bytes"
        assert (layer_sums(rig.slot(descriptors[i]), SHAPE) == sums[i]).all(), f"block {i} has other sums"
        assert rig.generation(descriptors[i]) == descriptors[i]["generation"], f"block {i} has another generation"
    if count:
        await rig.release(session, answer.reply)
    return count
