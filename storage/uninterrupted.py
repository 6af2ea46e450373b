"""Work that goes on to its end when its caller is cancelled, because threads use the caller's buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def uninterrupted(work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """Await `work`; a cancellation is passed on only when the work has ended."""
    future = asyncio.ensure_future(work)
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        if not future.cancelled():
            future.exception()  # it counts as seen: the cancelled caller has no use for it
        raise asyncio.CancelledError
    return future.result()
