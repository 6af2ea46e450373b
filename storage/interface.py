"""What the tiers ask of the nvme tier; the segment store implements it, the fakes in kvtierd.testing too.

Bookkeeping happens in the caller's loop, bytes move in the store's own threads. Nothing here touches the network
or other tiers.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Bytes, Sums
from kvtierd.core.errors import StorageError
from kvtierd.core.geometry import Geometry
from kvtierd.core.keys import Keys
from kvtierd.core.namespace import Namespace
from kvtierd.core.stored_form import Codec
from kvtierd.core.units import PAGE_BYTES


class IoMode(enum.StrEnum):
    """How bytes really reach the disk, as probed at start."""

    GDS = "gds"
    KVIKIO = "kvikio-compat"
    DIRECT = "o_direct"
    BUFFERED = "buffered"


class DiskError(StorageError):
    """The disk refused: not the caller's mistake, and not damage of what is stored."""


class GoneError(StorageError):
    """The block is no longer where the caller was told: its segment was recycled meanwhile. A miss, and no fault."""


class DegradedError(DiskError):
    """Not tried, because the disk takes no writes now; why was said when that began."""


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """Where a stored block lies: its header is at `offset` of the segment, `length` counts header and payload."""

    segment: int
    offset: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class Extents:
    """Extents as columns, [n] each: `segment` and `page` (offset / 4096) uint32, `length` int64."""

    segment: npt.NDArray[np.uint32]
    page: npt.NDArray[np.uint32]
    length: npt.NDArray[np.int64]

    @classmethod
    def of(cls, extents: Sequence[Extent]) -> Extents:
        """Columns of single extents."""
        return cls(
            np.array([extent.segment for extent in extents], np.uint32),
            np.array([extent.offset // PAGE_BYTES for extent in extents], np.uint32),
            np.array([extent.length for extent in extents], np.int64),
        )

    def __len__(self) -> int:
        return self.segment.size

    def __getitem__(self, index: int) -> Extent:
        return Extent(int(self.segment[index]), int(self.page[index]) * PAGE_BYTES, int(self.length[index]))

    def __iter__(self) -> Iterator[Extent]:
        return (self[index] for index in range(len(self)))

    def take(self, indices: npt.NDArray[np.intp]) -> Extents:
        """Those at `indices`, in that order."""
        return Extents(self.segment[indices], self.page[indices], self.length[indices])


@dataclasses.dataclass(slots=True)
class WriteItem:
    """One block to store. `data` is in slot form ([slot_bytes] uint8, layer parts padded to 4 KiB, page-aligned where
    the memory allows it); `sums` are its layer sums, which the store verifies against `data` before it writes.

    `tag` is the caller's number for the block; it comes back when the extent is reclaimed. With another `codec` than
    RAW `data` and `sums` are of the form that it gives the block (kvtierd.core.stored_form).
    """

    namespace: bytes
    key: bytes
    geometry: Geometry
    data: Bytes
    sums: Sums
    tag: int
    codec: int = Codec.RAW


@dataclasses.dataclass(slots=True)
class ReadItem:
    """One block to fetch into `out` (slot form, [slot_bytes]); `sums` ([layers] u64) receives its layer sums.

    `codec` says in which form it was stored: `extent`, `block_sum`, `out` and `sums` are of that form.
    """

    namespace: bytes
    key: bytes
    geometry: Geometry
    extent: Extent
    block_sum: int
    out: Bytes
    sums: Sums
    codec: int = Codec.RAW


@dataclasses.dataclass(slots=True)
class LayerParts:
    """The parts of one layer of `n` blocks that are stored in one form, `codec` (kvtierd.core.stored_form).

    Columns: `keys` [n, 32] uint8, `extents`, `block_sums` [n] u64. Part i is fetched into `memory` (uint8) from
    `offsets[i]` ([n] int64) on, `layer_stride` bytes of the stored form. `sums` ([n, layers] u64) are that form's layer
    sums: what a part is checked against where it is `known` ([n] bool), else filled in from the header.
    """

    namespace: bytes
    geometry: Geometry
    layer: int
    keys: Keys
    extents: Extents
    block_sums: Sums
    memory: Bytes
    offsets: npt.NDArray[np.int64]
    sums: Sums
    known: npt.NDArray[np.bool_]
    codec: int = Codec.RAW

    def __len__(self) -> int:
        return self.offsets.size

    def take(self, which: npt.NDArray[np.intp]) -> LayerParts:
        """Those at `which`, in that order; `sums` that are filled in there are not filled in here."""
        return dataclasses.replace(
            self,
            keys=self.keys[which],
            extents=self.extents.take(which),
            block_sums=self.block_sums[which],
            offsets=self.offsets[which],
            sums=self.sums[which],
            known=self.known[which],
        )

    def name(self, i: int) -> str:
        """What messages call a block."""
        return f"block {self.keys[i].tobytes().hex()[:16]}"


@dataclasses.dataclass(slots=True)
class Recovered:
    """What a store found when it was opened: columns over live blocks, newest copy of each key only.

    `namespaces` has every namespace by digest; `space` ([n] int32) is a block's index into `digests`; `keys` is
    [n, 32] uint8, `block_sums` [n] uint64, `codecs` [n] uint8 (Codec). Tags of recovered extents are
    unknown to the store until `adopt` is called.
    `source` says what the index was read from.
    """

    namespaces: dict[bytes, Namespace]
    digests: list[bytes]
    space: npt.NDArray[np.int32]
    keys: npt.NDArray[np.uint8]
    extents: Extents
    block_sums: Sums
    codecs: npt.NDArray[np.uint8]
    source: str = ""
    dropped: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)


class BlockStore(Protocol):
    """An nvme tier: append-only, checksummed, recovering."""

    @property
    def mode(self) -> IoMode:
        """How bytes reach the disk; as probed once the store is open."""
        ...

    async def open(self) -> Recovered:
        """Lock the directory, recover, be ready. Raises StartupError (74 I/O, 75 locked) with one clear line."""
        ...

    def adopt(self, extents: Extents, tags: npt.NDArray[np.int64]) -> None:
        """Tell the store the caller's numbers of the recovered extents, in their order."""
        ...

    def on_reclaim(
        self,
        callback: Callable[[list[tuple[int, Extent]]], None],
        lost: Callable[[list[tuple[int, Extent]]], None] | None = None,
    ) -> None:
        """Set who is told, on the loop, which (tag, extent) pairs are about to be recycled; reads of them then fail
        with GoneError. `lost` is told of those that a failed sync put in doubt; without it `callback` is."""
        ...

    def on_rewrite(
        self,
        heats: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float32]],
        moved: Callable[[list[tuple[int, Extent, Extent]]], list[bool]],
    ) -> None:
        """Let the store write blocks again that are hot when their segment is recycled.

        `heats` gives the heat of tags ([n] float32, 0 is cold). `moved` is told (tag, old extent, new extent), all
        valid at that moment, and says which the caller still has at the old place: it uses the new one from then on.
        A block that the caller is just storing anew is none of them.
        """
        ...

    def register(self, digest: bytes, namespace: Namespace) -> None:
        """Make a namespace known; it is written before its first block in each segment."""
        ...

    async def write(self, items: Sequence[WriteItem]) -> list[Extent | StorageError]:
        """Store blocks in their order. One bad item (CorruptionError when its source does not match its sums) does not
        hold up the others. A returned extent can be read at once; it is durable after the next `flush`."""
        ...

    async def read(self, items: Sequence[ReadItem]) -> list[StorageError | None]:
        """Fetch blocks; None is success. Bytes that fail a checksum, another block's bytes, or a short read are a
        CorruptionError or StorageError, and then `out` holds nothing that may be used."""
        ...

    async def read_layers(self, parts: LayerParts) -> dict[int, StorageError]:
        """Fetch parts, all of them as one request in flight on each device: by index, why one did not come.

        Errors are those of `read`; of a part with an error, neither bytes nor `sums` may be used. Nothing of an extent
        is read but the layer's part, and its header where the sums are not known.
        """
        ...

    async def delete(self, items: Sequence[tuple[bytes, bytes, Extent]]) -> None:
        """Append durable tombstones for (namespace digest, key, extent); the extents count as dead at once."""
        ...

    async def flush(self) -> None:
        """Return when everything written or deleted before the call is on stable storage. Raises StorageError."""
        ...

    async def close(self) -> None:
        """Flush and let go of the directory."""
        ...

    def stats(self) -> dict[str, int | str]:
        """Counters and gauges by name: bytes, extents, segments, dropped, mode."""
        ...
