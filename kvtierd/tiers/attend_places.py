"""Where the parts of blocks lie that attention reads: addresses in gpu and host slots, and what must be brought first.

The one place that knows the stored form of a copy: an exact part, or codes and scales (kvtierd.core.stored_form).
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import Codec, EncodedLayout
from kvtierd.gpu.attend import CODED, code_of
from kvtierd.gpu.attend import Blocks as Parts
from kvtierd.gpu.slot_pool import SlotClass, Slots
from kvtierd.protocol.messages import TIER_GPU, TIER_HOST, TIER_NVME
from kvtierd.tiers.blocks import Rows
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.gpu_tier import GpuTier
from kvtierd.tiers.host_tier import HostTier
from kvtierd.tiers.namespaces import NamespaceEntry

Addresses = npt.NDArray[np.uint64]
Codecs = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]


class Place(enum.IntEnum):
    """Where a block's part is read from. The first two are computed where they lie, the others are brought first."""

    GPU = 0
    HOST = 1
    SCATTERED = 2
    """In host, in extents of other sizes."""
    GPU_ONLY = 3
    """In a gpu slot that what computes cannot read."""
    NVME = 4
    NOWHERE = 5
    COMPRESSED = 6
    """In host, in FP8."""


_NVME = int(Place.NVME)
_TIERS = np.zeros(len(Place), np.uint8)
_TIERS[[Place.GPU, Place.GPU_ONLY]], _TIERS[Place.NVME] = TIER_GPU, TIER_NVME
_TIERS[[Place.HOST, Place.SCATTERED, Place.COMPRESSED]] = TIER_HOST
"""The tier of each place."""


class Fidelity(enum.Enum):
    """Which copies may be computed from, where some have been through FP8."""

    ANY = "any"
    """The nearest."""
    EXACT_FIRST = "exact first"
    """The nearest exact one; where there is none, the nearest."""
    EXACT = "exact"
    """The nearest exact one."""


def places_of(copies: Copies, rows: Rows, fidelity: Fidelity = Fidelity.ANY) -> Codecs:
    """The best place of each block now, [n] uint8 (`Place`)."""
    forms = copies.shapes.forms
    if fidelity is Fidelity.ANY or not forms.seen:
        if (copies.blocks.residency(rows) == TIER_NVME).all():  # most of what is brought lies there and nowhere else
            return np.full(rows.size, _NVME, np.uint8)
        return _places(copies, rows, np.zeros(rows.size, np.uint8))
    found = _places(copies, rows, forms.lossy[rows])
    if fidelity is Fidelity.EXACT_FIRST and (left := np.flatnonzero(found == Place.NOWHERE)).size:
        found[left] = _places(copies, rows[left], np.zeros(left.size, np.uint8))
    return found


def _places(copies: Copies, rows: Rows, unwanted: Codecs) -> Codecs:
    """`unwanted` are tiers of which the copy is not to be used, [n]."""
    table = copies.blocks.table
    found = np.full(rows.size, Place.NOWHERE, np.uint8)
    found[(table.segment[rows] >= 0) & ((unwanted & TIER_NVME) == 0)] = Place.NVME
    in_gpu = (table.gpu_slot[rows] >= 0) & ((unwanted & TIER_GPU) == 0)
    host = (unwanted & TIER_HOST) == 0
    reachable = copies.gpu is not None and copies.gpu.device.compute_address != 0
    if not reachable:
        found[in_gpu] = Place.GPU_ONLY
    found[copies.shapes.scattered(rows) & host] = Place.SCATTERED
    found[copies.shapes.forms.mask(rows) & host] = Place.COMPRESSED
    found[(table.host_slot[rows] >= 0) & host] = Place.HOST
    if reachable:
        found[in_gpu] = Place.GPU
    return found


def lossy_at(copies: Copies, rows: Rows, places: Codecs) -> npt.NDArray[np.bool_]:
    """Which of these blocks' copies at these places have been through FP8, [n]."""
    forms = copies.shapes.forms
    if not forms.seen:
        return np.zeros(rows.size, np.bool_)
    tiers = _TIERS[places]
    found: npt.NDArray[np.bool_] = (forms.lossy[rows] & tiers) != 0
    return found


def host_addresses(host: HostTier, cls: SlotClass, slots: Slots) -> Addresses:
    """Addresses of host slots of a class, [n]."""
    slabs, offsets = host.pool.slabs_of(slots), host.pool.offsets(cls, slots)
    numbers, first, which = np.unique(slabs, return_index=True, return_inverse=True)
    bases = [
        int(host.view(cls, int(slots[i])).ctypes.data) - int(offsets[i]) for i, _ in zip(first, numbers, strict=True)
    ]
    return np.array(bases, np.uint64)[which] + offsets.astype(np.uint64)


def gpu_addresses(gpu: GpuTier, cls: SlotClass, slots: Slots) -> Addresses:
    """Addresses of gpu slots of a class, [n], for what computes attention on their device."""
    begins = gpu.pool.slabs_of(slots).astype(np.uint64) * np.uint64(gpu.pool.slab_bytes)
    return begins + gpu.pool.offsets(cls, slots).astype(np.uint64) + np.uint64(gpu.device.compute_address)


class LayerForm:
    """One layer's part of the blocks of a namespace, as kernels see it."""

    def __init__(self, entry: NamespaceEntry, layer: int) -> None:
        self.geometry: Geometry = entry.geometry
        self.layer = layer
        self.code = code_of(entry.geometry)

    def in_slots(self, addresses: Addresses, numbers: Numbers, tokens: Any, tiers: Any) -> Parts:
        """Parts of blocks in exact form in slots at these addresses; `numbers` are their places in the sequence."""
        begins = addresses + np.uint64(self.layer * self.geometry.layer_stride)
        return self.of_parts(begins, np.zeros(numbers.size, np.uint8), numbers, tokens, tiers)

    def of_parts(self, begins: Addresses, codecs: Codecs, numbers: Numbers, tokens: Numbers, tiers: Any) -> Parts:
        """Parts that begin at these addresses, each in the form that its codec gives it."""
        dtypes, scales = np.full(numbers.size, self.code, np.uint8), np.zeros(numbers.size, np.uint64)
        if (coded := codecs != Codec.RAW).any():
            dtypes[coded] = CODED
            scales[coded] = begins[coded] + np.uint64(EncodedLayout(self.geometry).scales_offset)
        return Parts(
            addresses=begins,
            scales=scales,
            dtypes=dtypes,
            tokens=tokens.astype(np.int32),
            positions=numbers * self.geometry.block_size,
            tiers=np.broadcast_to(np.asarray(tiers, np.uint8), begins.shape),
        )
