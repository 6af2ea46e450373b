"""What a synchronous client holds in the arena: reservations to write into, leases to read from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from kvtierd.core.checksum import Bytes, Sums
from kvtierd.protocol.asking import Plan
from kvtierd.protocol.grants import Granted, Leased
from kvtierd.protocol.results import Codecs, Masks, NamespaceHandle
from kvtierd.protocol.slots import SlotPlans
from kvtierd.protocol.waiting import Driver

After = Callable[[int], Plan[None]]
"""What follows a commit that nobody waits for, at once, so that both messages leave together; gets the deadline."""


class ReservedSlots:
    """Slots to write blocks into. `status` is [n] uint8 (SLOT_*); `views[i]` is the slot of block i, [slot_bytes] uint8
    with every layer part at a multiple of `layer_stride`, or None where it was not granted or is committed.
    """

    def __init__(
        self,
        plans: SlotPlans,
        namespace: NamespaceHandle,
        grant: Granted,
        timeout_s: float,
        after: After | None = None,
    ) -> None:
        self._plans = plans
        self._after = after
        self._grant = grant
        self._timeout_s = timeout_s
        self.namespace = namespace
        self.status: Masks = grant.status
        self.views: list[Bytes | None] = grant.views

    def _deadline_ns(self, timeout_s: float | None) -> int:
        return time.monotonic_ns() + int((self._timeout_s if timeout_s is None else timeout_s) * 1e9)


class LeasedSlots:
    """A hold on the leading run of present blocks, `count` of them.

    `views` are read-only slots ([slot_bytes] uint8), `sums` their layer sums ([count, layers] u64), `sources` where
    each was found, `codecs` what each has been through (as in Hit). A view may be overwritten once the lease has
    expired: `copy_to` and `unchanged` tell what can be trusted.
    """

    def __init__(self, plans: SlotPlans, namespace: NamespaceHandle, leased: Leased) -> None:
        self._plans = plans
        self._leased = leased
        self.namespace = namespace
        self.count = leased.count
        self.views: list[Bytes] = leased.views
        self.sums: Sums = leased.sums
        self.sources: Masks = leased.sources
        self.codecs: Codecs = leased.codecs

    def unchanged(self) -> int:
        """How many leading blocks are still in their slots: what was read from their `views` before is whole."""
        return self._leased.unchanged()


class Reservation(ReservedSlots):
    """As a context manager: what is not committed when it ends is given back."""

    def __init__(
        self,
        driver: Driver,
        plans: SlotPlans,
        namespace: NamespaceHandle,
        grant: Granted,
        timeout_s: float,
        after: After | None = None,
    ) -> None:
        super().__init__(plans, namespace, grant, timeout_s, after)
        self._driver = driver

    def commit(
        self,
        index: Sequence[int] | None = None,
        *,
        sums: Sums | None = None,
        verify: bool = False,
        wait: bool = True,
        timeout_s: float | None = None,
    ) -> int:
        """Make blocks visible; how many are now, whoever stored them.

        `index` names them by position, None takes all that were granted and not committed yet. `sums` are their layer
        sums ([len(index), layers] u64) where the writer has them; otherwise they are hashed here. Blocks that are not
        named stay reserved. Raises ValueError for a block that was not granted.

        `wait=False` hands the blocks over and returns how many without waiting for the answer: later calls of this
        client find them, and `client.counters["stores_dropped_refused"]` tells what the daemon did not take.
        """
        deadline_ns = self._deadline_ns(timeout_s)
        plan = self._plans.commit(
            self._grant, self.namespace, index, sums, verify=verify, wait=wait, deadline_ns=deadline_ns
        )
        reply = self._driver.run(plan)
        if self._after is not None and not wait:
            self._driver.run(self._after(deadline_ns))
        return reply.committed + reply.existed

    def abort(self) -> None:
        """Give back what is not committed; does not wait."""
        self._driver.post(lambda: self._plans.give_back(self._grant))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class Lease(LeasedSlots):
    """As a context manager: it ends with the block."""

    def __init__(self, driver: Driver, plans: SlotPlans, namespace: NamespaceHandle, leased: Leased) -> None:
        super().__init__(plans, namespace, leased)
        self._driver = driver

    def copy_to(self, out: Bytes, *, verify: bool = True) -> int:
        """Copy the blocks packed into `out` ([>= count, block_bytes] uint8); how many leading ones are good.

        Good means that the slot did not change hands while it was copied and, with `verify`, that the checksum of
        the copy is the stored one.
        """
        check_out(out, self.count, self.namespace.geometry.block_bytes)
        return self._driver.run(self._plans.copy_out(self._leased, out, self.namespace, verify=verify))

    def release(self) -> None:
        """End the lease; does not wait, and a second call does nothing."""
        self._driver.post(lambda: self._plans.end(self._leased))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def check_out(out: Bytes | None, count: int, block_bytes: int) -> None:
    """Raise ValueError when `out` cannot take `count` packed blocks."""
    if out is None:
        return
    if out.dtype != np.uint8 or out.ndim != 2 or out.shape[1] != block_bytes or out.shape[0] < count:
        raise ValueError(f"out is {out.dtype} {out.shape}; uint8 [at least {count}, {block_bytes}] is wanted")
    if not out[0:1].flags.c_contiguous or not out.flags.writeable:
        raise ValueError("out must be writable, and each of its blocks contiguous")
