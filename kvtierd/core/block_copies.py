"""How a client moves blocks between packed form and slots: the plain way, in NumPy; another may be given to it."""

from __future__ import annotations

from kvtierd.core.checksum import Bytes, Sums, check_size, copy_parts
from kvtierd.core.geometry import Geometry


class PlainCopies:
    """Copies of one block, hashed as it lands. Another way overrides `parts`, to the same bytes and sums.

    Every method raises ValueError for memory that is shorter than the block. Threads call them at the same time.
    """

    def copy(self, slot: Bytes, packed: Bytes, geometry: Geometry) -> None:
        """Copy a block in slot form without its padding, and look at no byte."""
        _check(slot, packed, geometry)
        self.parts(slot, geometry.layer_stride, packed, geometry.layer_bytes, geometry, None)

    def copy_and_sum(self, slot: Bytes, packed: Bytes, geometry: Geometry, out: Sums) -> None:
        """As `copy`; the layer sums of what arrived go to `out` ([layers])."""
        _check(slot, packed, geometry)
        self.parts(slot, geometry.layer_stride, packed, geometry.layer_bytes, geometry, out)

    def fill_and_sum(self, packed: Bytes, slot: Bytes, geometry: Geometry, out: Sums) -> None:
        """Copy a packed block into slot form, zero the padding; the layer sums go to `out` ([layers])."""
        _check(slot, packed, geometry)
        self.parts(packed, geometry.layer_bytes, slot, geometry.layer_stride, geometry, out)
        if geometry.layer_stride != geometry.layer_bytes:
            rows = slot[: geometry.slot_bytes].reshape(geometry.layers, geometry.layer_stride)
            rows[:, geometry.layer_bytes :] = 0

    def parts(
        self, source: Bytes, source_step: int, target: Bytes, target_step: int, geometry: Geometry, out: Sums | None
    ) -> None:
        """Copy the layer parts that begin every `step` bytes; with `out`, and their sums into it."""
        if out is not None:
            copy_parts(source, source_step, target, target_step, geometry, out)
            return
        size, layers = geometry.layer_bytes, geometry.layers
        if source_step == target_step == size:
            target[: layers * size] = source[: layers * size]
            return
        rows = source[: layers * source_step].reshape(layers, source_step)
        target[: layers * target_step].reshape(layers, target_step)[:, :size] = rows[:, :size]


def _check(slot: Bytes, packed: Bytes, geometry: Geometry) -> None:
    check_size("slot", slot, geometry.slot_bytes)
    check_size("packed", packed, geometry.block_bytes)
