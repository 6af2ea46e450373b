"""How much of the host tier one tenant may hold, over all of its clients: leases, reservations and open sequences.

What is held can be neither evicted nor given to another tenant. A slot counts once, however many clients hold it: a
prefix that everybody reads is no more memory than one that one reads. Kept only where there are several tenants.
"""

from __future__ import annotations

import collections

import numpy as np
import numpy.typing as npt

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.units import format_bytes
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.index.memory import reserve
from kvtierd.policy.admission import leading

RETRY_MS = 100


class LeaseQuota:
    """Bytes of host slots that tenants hold, and the most that one may. Everything runs on the loop."""

    def __init__(self, slots_max: int, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        """Most of one tenant; what it has over a lowered one ends with its leases."""
        self.refused: collections.Counter[str] = collections.Counter()
        """By tenant: how often something was refused or cut short."""
        self._held: collections.Counter[str] = collections.Counter()
        self._times: npt.NDArray[np.int32] = reserve((slots_max,), np.int32, huge=False)
        """By slot: in how many leases, reservations and sequences it is."""

    def held_bytes(self, tenant: str) -> int:
        """What a tenant holds."""
        return self._held[tenant]

    def room(self, cls: SlotClass) -> int:
        """How many more slots of a class its tenant may hold."""
        return max(0, self.limit_bytes - self._held[cls.tenant]) // cls.slot_bytes

    def fitting(self, cls: SlotClass, slots: Slots) -> int:
        """How many leading ones of these slots may be held; those that the tenant holds already always may."""
        if self._held[cls.tenant] + slots.size * cls.slot_bytes <= self.limit_bytes:
            return slots.size
        return leading(np.cumsum(self._times[slots] == 0) <= self.room(cls))

    def fitting_bytes(self, tenant: str, slots: Slots, sizes: npt.NDArray[np.int64]) -> int:
        """As `fitting`, of slots of several classes: `sizes` ([n]) are their bytes."""
        more = np.where(self._times[slots] == 0, sizes, 0)
        return leading(np.cumsum(more) <= max(0, self.limit_bytes - self._held[tenant]))

    def begin(self, cls: SlotClass, slots: Slots) -> None:
        """These slots, of which one may be named twice, are in one more lease."""
        fresh = slots[self._times[slots] == 0]
        np.add.at(self._times, slots, 1)
        if fresh.size:
            self._held[cls.tenant] += np.unique(fresh).size * cls.slot_bytes

    def end(self, cls: SlotClass, slots: Slots) -> None:
        """Undo one `begin`."""
        np.subtract.at(self._times, slots, 1)
        ended = slots[self._times[slots] == 0]
        if ended.size:
            self._held[cls.tenant] -= np.unique(ended).size * cls.slot_bytes

    def refusal(self, tenant: str) -> RequestError:
        """What a client is told that may hold no more."""
        return RequestError(
            ErrorCode.BUSY,
            f"tenant {tenant} holds {format_bytes(self._held[tenant])} of the host tier in leases, reservations and "
            f"sequences, and may hold {format_bytes(self.limit_bytes)} (leases.tenant_share); release some",
            retry_after_ms=RETRY_MS,
        )
