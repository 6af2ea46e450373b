"""How many slabs of a tier a tenant may have: its quota in bytes, where memory is given out."""

from __future__ import annotations

from collections.abc import Mapping

from kvtierd.gpu.slot_pool import SlotClass, SlotPool

NO_LIMIT = 1 << 30


class SlabQuota:
    """Quotas of one tier. A tenant has slabs by its classes; looked at only when a class needs another one."""

    def __init__(self, pool: SlotPool, limits_bytes: Mapping[str, int]) -> None:
        self._pool = pool
        self._limits: dict[str, int] = {}
        self.set(limits_bytes)

    def set(self, limits_bytes: Mapping[str, int]) -> None:
        """Take over quotas by tenant; 0 is none. A tenant may have one slab whatever its quota, or it had no use."""
        self._limits = {name: max(1, size // self._pool.slab_bytes) for name, size in limits_bytes.items() if size}

    def left(self, tenant: str) -> int:
        """Slabs that a tenant may still get; negative where it has more than its quota."""
        limit = self._limits.get(tenant)
        return NO_LIMIT if limit is None else limit - self._slabs(tenant)

    def to_give(self) -> SlotClass | None:
        """The largest class of a tenant that has more slabs than it may; None while all is well."""
        for tenant, limit in self._limits.items():
            if self._slabs(tenant) > limit:
                return max(self._of(tenant), key=lambda cls: len(cls.slabs))
        return None

    def _slabs(self, tenant: str) -> int:
        return sum(len(cls.slabs) for cls in self._of(tenant))

    def _of(self, tenant: str) -> list[SlotClass]:
        return [cls for cls in self._pool.classes if cls.tenant == tenant]
