"""An nvme tier in memory, with every fault that a real one has, on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvtierd.core.checksum import Bytes, Sums, block_sum, layer_sums
from kvtierd.core.errors import CorruptionError, StorageError
from kvtierd.core.namespace import Namespace
from kvtierd.core.stored_form import Codec, form_of
from kvtierd.storage.interface import Extent, Extents, IoMode, LayerParts, ReadItem, Recovered, WriteItem
from kvtierd.storage.layout import block_shape


class MemoryStore:
    """Implements storage.interface.BlockStore. What it keeps can be handed to a later life.

    `fail_writes`, `fail_reads` count operations that fail next; `stall` is an event that holds writes back while it is
    not set; `corrupt` flips a bit of a stored block.
    """

    mode = IoMode.BUFFERED

    def __init__(self, earlier: MemoryStore | None = None) -> None:
        self.blocks: dict[tuple[bytes, bytes], tuple[Extent, Bytes, Sums]] = dict(earlier.blocks) if earlier else {}
        self.codecs: dict[int, int] = dict(earlier.codecs) if earlier else {}
        """Of blocks that are not RAW, by the offset of their extent."""
        self.namespaces: dict[bytes, Namespace] = dict(earlier.namespaces) if earlier else {}
        self.tags: dict[int, int] = {}
        self.fail_writes = 0
        self.fail_reads = 0
        self.fail_flushes = 0
        self.stall = asyncio.Event()
        self.stall.set()
        self.flushes = 0
        self.layer_reads = 0
        self._next_offset = max((extent.offset for extent, _, _ in self.blocks.values()), default=0) + 4096
        self._callback: Callable[[list[tuple[int, Extent]]], None] = lambda _gone: None
        self._moved: Callable[[list[tuple[int, Extent, Extent]]], list[bool]] = lambda told: [False] * len(told)

    async def open(self) -> Recovered:
        """What the earlier life kept."""
        names = list(self.blocks)
        return Recovered(
            namespaces=dict(self.namespaces),
            digests=[digest for digest, _ in names],
            space=np.arange(len(names), dtype=np.int32),
            keys=np.frombuffer(b"".join(key for _, key in names), np.uint8).reshape(len(names), 32),
            extents=Extents.of([self.blocks[name][0] for name in names]),
            block_sums=np.array([block_sum(self.blocks[name][2]) for name in names], np.uint64),
            codecs=np.array([self.codecs.get(self.blocks[name][0].offset, Codec.RAW) for name in names], np.uint8),
        )

    def adopt(self, extents: Extents, tags: npt.NDArray[np.int64]) -> None:
        """Remember the caller's numbers."""
        self.tags.update(zip((extent.offset for extent in extents), tags.tolist(), strict=True))

    def on_reclaim(
        self,
        callback: Callable[[list[tuple[int, Extent]]], None],
        lost: Callable[[list[tuple[int, Extent]]], None] | None = None,  # noqa: ARG002 - its flushes lose nothing
    ) -> None:
        """Remember who is told."""
        self._callback = callback

    def on_rewrite(
        self,
        heats: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float32]],
        moved: Callable[[list[tuple[int, Extent, Extent]]], list[bool]],
    ) -> None:
        """Nothing here is recycled by itself; `move` moves a block."""
        del heats
        self._moved = moved

    def move(self, digest: bytes, key: bytes) -> bool:
        """Let a block lie elsewhere, as the reclaim of a segment would; whether its owner went along."""
        old, data, sums = self.blocks[digest, key]
        new = Extent(0, self._next_offset, old.length)
        self._next_offset += old.length
        (kept,) = self._moved([(self.tags[old.offset], old, new)])
        if kept:
            self.blocks[digest, key] = (new, data, sums)
            self.codecs[new.offset] = self.codecs.pop(old.offset, Codec.RAW)
            self.tags[new.offset] = self.tags[old.offset]
        return kept

    def register(self, digest: bytes, namespace: Namespace) -> None:
        """Remember a namespace."""
        self.namespaces[digest] = namespace

    async def write(self, items: Sequence[WriteItem]) -> list[Extent | StorageError]:
        """Keep copies."""
        await self.stall.wait()
        return [self._write(item) for item in items]

    async def read(self, items: Sequence[ReadItem]) -> list[StorageError | None]:
        """Copy out, verified."""
        await asyncio.sleep(0)
        return [self._read(item) for item in items]

    async def read_layers(self, parts: LayerParts) -> dict[int, StorageError]:
        """Copy layer parts out, verified."""
        await asyncio.sleep(0)
        self.layer_reads += len(parts)
        found = {i: self._read_layer(parts, i) for i in range(len(parts))}
        return {i: error for i, error in found.items() if error is not None}

    async def delete(self, items: Sequence[tuple[bytes, bytes, Extent]]) -> None:
        """Forget blocks that still lie where the caller says."""
        for digest, key, extent in items:
            held = self.blocks.get((digest, key))
            if held is not None and held[0].offset == extent.offset:
                del self.blocks[digest, key]

    async def flush(self) -> None:
        """Nothing is volatile here, but it can fail."""
        if self.fail_flushes:
            self.fail_flushes -= 1
            raise StorageError("flush: injected failure")
        self.flushes += 1

    async def close(self) -> None:
        """Nothing to let go of."""

    def stats(self) -> dict[str, int | str]:
        """Counts."""
        return {"stored_extents": len(self.blocks), "mode": str(self.mode)}

    def corrupt(self, digest: bytes, key: bytes) -> None:
        """Flip a bit of a stored block."""
        self.blocks[digest, key][1][5] ^= 1

    def reclaim(self, digest: bytes, key: bytes) -> None:
        """Recycle a block's extent, as a full store would."""
        extent = self.blocks.pop((digest, key))[0]
        self._callback([(self.tags[extent.offset], extent)])

    def _write(self, item: WriteItem) -> Extent | StorageError:
        if self.fail_writes:
            self.fail_writes -= 1
            return StorageError("write: injected failure")
        shape = block_shape(item.geometry, item.codec)
        if item.data.size != shape.payload_bytes:
            return StorageError(f"write: {item.data.size} bytes; {shape.payload_bytes} are wanted")
        if (layer_sums(item.data, form_of(item.geometry, item.codec)) != item.sums).any():
            return CorruptionError(f"block {item.key.hex()[:16]}: its bytes do not match its layer sums")
        extent = Extent(0, self._next_offset, item.data.size)
        self._next_offset += item.data.size
        self.codecs[extent.offset] = item.codec
        self.blocks[item.namespace, item.key] = (extent, item.data.copy(), item.sums.copy())
        self.tags[extent.offset] = item.tag
        return extent

    def _read(self, item: ReadItem) -> StorageError | None:
        if self.fail_reads:
            self.fail_reads -= 1
            return StorageError("read: injected failure")
        held = self.blocks.get((item.namespace, item.key))
        if held is None or held[0].offset != item.extent.offset:
            return CorruptionError("the extent holds another block")
        if (stored := self.codecs.get(held[0].offset, Codec.RAW)) != item.codec or item.out.size != held[1].size:
            return StorageError(f"the extent is of codec {stored}, not {item.codec}")
        item.out[:] = held[1]
        if (layer_sums(item.out, form_of(item.geometry, item.codec)) != held[2]).any() or block_sum(
            held[2]
        ) != item.block_sum:
            return CorruptionError(f"block {item.key.hex()[:16]}: checksum mismatch on disk")
        item.sums[:] = held[2]
        return None

    def _read_layer(self, parts: LayerParts, i: int) -> StorageError | None:
        if self.fail_reads:
            self.fail_reads -= 1
            return StorageError("read: injected failure")
        held = self.blocks.get((parts.namespace, parts.keys[i].tobytes()))
        if held is None or held[0].offset != parts.extents[i].offset:
            return StorageError(f"{parts.name(i)} is no longer there")
        if (stored := self.codecs.get(held[0].offset, Codec.RAW)) != parts.codec:
            return StorageError(f"the extent is of codec {stored}, not {parts.codec}")
        shape = form_of(parts.geometry, parts.codec)
        begin = parts.layer * shape.layer_stride
        out = parts.memory[parts.offsets[i] :][: shape.layer_stride]
        out[:] = held[1][begin : begin + shape.layer_stride]
        if block_sum(held[2]) != parts.block_sums[i]:
            return CorruptionError(f"{parts.name(i)}: another block lies there")
        if not parts.known[i]:
            parts.sums[i] = held[2]
        if xxhash.xxh3_64_intdigest(out[: shape.layer_bytes].data) != int(parts.sums[i, parts.layer]):
            return CorruptionError(f"{parts.name(i)}: checksum mismatch of layer {parts.layer} on disk")
        return None
