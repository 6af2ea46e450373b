"""The gpu tier: slots in the pool of a device, whatever the device is."""

from __future__ import annotations

from kvtierd.core.checksum import Bytes
from kvtierd.gpu import Device
from kvtierd.gpu.slot_pool import SlotClass
from kvtierd.policy.eviction import EvictionPolicy
from kvtierd.tiers.slot_tier import SlotTier


class GpuTier(SlotTier):
    """The pool is one allocation; a slab is a part of it, and slabs change classes without moving."""

    def __init__(self, device: Device, slab_bytes: int, policy: EvictionPolicy) -> None:
        slabs = device.capacity_bytes // slab_bytes
        super().__init__(slab_bytes, slabs, policy)
        self.device = device
        self.spare = list(range(slabs - 1, -1, -1))

    def copy_in(self, cls: SlotClass, slot: int, source: Bytes) -> None:
        """Copy a block in slot form into a slot. Runs in a worker thread."""
        self.device.copy_in(self._offset(cls, slot), source)

    def copy_out(self, cls: SlotClass, slot: int, target: Bytes) -> None:
        """Copy a slot's block out in slot form. Runs in a worker thread."""
        self.device.copy_out(self._offset(cls, slot), target)

    def copy_part_out(self, cls: SlotClass, slot: int, begin: int, target: Bytes) -> None:
        """Copy a part of a slot out, from byte `begin` on. Runs in a worker thread."""
        self.device.copy_out(self._offset(cls, slot) + begin, target)

    def _offset(self, cls: SlotClass, slot: int) -> int:
        slab, index = self.pool.place(slot)
        return slab * self.pool.slab_bytes + index * cls.slot_bytes
