"""Several devices as one tier: a store in each directory, batches spread over them.

A segment lies on one device. Batches are cut into stripes, and each goes to the device with the least under way, so a
prefix is read from all of them at once. A device that fails is one whose blocks are misses; the others go on, and what
it refuses is stored on another.

An extent's segment number is the device's own number times the count of devices plus the device's place in the list, so
the list may grow or change its order between two starts. What is deleted while a device is missing at start comes back
with it: its tombstones can be nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Awaitable, Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from kvtierd.config.fields import split_folders
from kvtierd.config.schema import Nvme
from kvtierd.core.clock import Clock
from kvtierd.core.errors import ExitCode, StartupError, StorageError
from kvtierd.core.namespace import Namespace
from kvtierd.core.progress import Progress
from kvtierd.core.units import MIB
from kvtierd.storage.interface import DiskError, Extent, Extents, IoMode, LayerParts, ReadItem, Recovered, WriteItem
from kvtierd.storage.merging import merge
from kvtierd.storage.rewriting import Heats, Moved
from kvtierd.storage.ring import Reclaimed
from kvtierd.storage.stats import combine
from kvtierd.storage.store import SegmentStore
from kvtierd.storage.uninterrupted import uninterrupted

_log = logging.getLogger(__name__)

STRIPE_BYTES = 8 * MIB
"""Written to one device in one piece: long enough to be sequential, short enough to spread a prefix."""


@dataclasses.dataclass(slots=True)
class _Device:
    """One directory's store; `cause` is why it could not be opened. `under_way` and `placed` are bytes of blocks."""

    store: SegmentStore
    directory: str
    cause: str = ""
    under_way: int = 0
    placed: int = 0

    @property
    def problem(self) -> str:
        """Why it takes no stores now."""
        return self.cause or self.store.cause


class StripedStore:
    """A BlockStore over a SegmentStore for each of the directories."""

    def __init__(self, stores: Sequence[tuple[str, SegmentStore]]) -> None:
        self.progress = Progress()
        self._devices = [_Device(store, directory) for directory, store in stores]
        for device in self._devices:
            device.store.progress = self.progress
        self._tell: Reclaimed = lambda _: None
        self._lost: Reclaimed = lambda _: None
        # Extents that a device has acknowledged while the caller's batch still waits for others; False: gone again.
        self._unreturned: dict[Extent, bool] = {}

    @property
    def mode(self) -> IoMode:
        """How bytes reach the first device that works."""
        return self._open_devices()[0][1].store.mode

    async def open(self) -> Recovered:
        """Open every device. Raises StartupError when none can be opened, or for what an operator must know of."""
        found: list[tuple[int, Recovered]] = []
        try:
            for place, device in enumerate(self._devices):
                if (recovered := await self._open_one(device)) is not None:
                    found.append((place, recovered))
            if not found:
                raise StartupError(ExitCode.IO, "; ".join(device.cause for device in self._devices))
            return await self._merged(found)
        except BaseException:
            await self._close_all()
            raise

    async def _open_one(self, device: _Device) -> Recovered | None:
        try:
            recovered = await device.store.open()
        except StartupError as error:
            # A device may be broken; a second daemon, a newer format or a missing mode is not the device's fault.
            if not isinstance(error.__cause__, OSError) or error.exit_code != ExitCode.IO:
                raise
            device.cause = str(error)
            _log.error("%s; its blocks are misses until it is repaired and the daemon restarted", error)
            return None
        recovered.notes[:] = [f"{device.directory}: {note}" for note in recovered.notes]
        return recovered

    async def _merged(self, found: list[tuple[int, Recovered]]) -> Recovered:
        """One view over what all devices have; of a block that lies on two, one is kept."""
        recovered, twice = merge(found, self._global)
        for digest, namespace in recovered.namespaces.items():
            self.register(digest, namespace)
        recovered.notes += [device.cause for device in self._devices if device.cause]
        if twice:
            recovered.notes.append(f"{len(twice)} blocks lay on two devices; one of each was dropped")
            await self.delete(twice)
        return recovered

    def adopt(self, extents: Extents, tags: npt.NDArray[np.int64]) -> None:
        """See BlockStore.adopt."""
        count = len(self._devices)
        for place, device in self._open_devices():
            mine = np.flatnonzero(extents.segment % count == place)
            own = extents.take(mine)
            device.store.adopt(Extents(own.segment // np.uint32(count), own.page, own.length), tags[mine])

    def on_reclaim(self, callback: Reclaimed, lost: Reclaimed | None = None) -> None:
        """See BlockStore.on_reclaim."""
        self._tell, self._lost = callback, lost or callback
        for place, device in enumerate(self._devices):
            device.store.on_reclaim(
                functools.partial(self._announce, place),
                functools.partial(self._announce, place, lost=True),
            )

    def _announce(self, place: int, told: list[tuple[int, Extent]], *, lost: bool = False) -> None:
        known = []
        for tag, own in told:
            extent = self._global(place, own)
            if extent in self._unreturned:
                self._unreturned[extent] = False
            else:
                known.append((tag, extent))
        if known:
            (self._lost if lost else self._tell)(known)

    def on_rewrite(self, heats: Heats, moved: Moved) -> None:
        """See BlockStore.on_rewrite."""

        def moved_on(place: int, moves: list[tuple[int, Extent, Extent]]) -> list[bool]:
            return moved([(tag, self._global(place, old), self._global(place, new)) for tag, old, new in moves])

        for place, device in enumerate(self._devices):
            device.store.on_rewrite(heats, functools.partial(moved_on, place))

    def register(self, digest: bytes, namespace: Namespace) -> None:
        """See BlockStore.register."""
        for _, device in self._open_devices():
            device.store.register(digest, namespace)

    async def write(self, items: Sequence[WriteItem]) -> list[Extent | StorageError]:
        """See BlockStore.write. What one device refuses is tried on another."""
        results: list[Extent | StorageError] = []
        try:
            await uninterrupted(self._write(items, results))
        except asyncio.CancelledError:
            await self._disown(items, results)
            raise
        return [self._acknowledged(result) for result in results]

    async def _write(self, items: Sequence[WriteItem], results: list[Extent | StorageError]) -> None:
        """Fill `results`; extents in it are unreturned until somebody decides about them."""
        results += [StorageError("not written yet")] * len(items)
        left = list(range(len(items)))
        for _ in self._devices:
            jobs = [self._write_stripe(items, stripe, results) for stripe in _stripes(items, left)]
            await asyncio.gather(*jobs)
            left = [index for index in left if isinstance(results[index], DiskError)]
            if not left or not any(not device.problem for device in self._devices):
                return

    async def _write_stripe(
        self, items: Sequence[WriteItem], stripe: list[int], results: list[Extent | StorageError]
    ) -> None:
        place, device = self._best_device()
        size = sum(items[index].data.size for index in stripe)
        device.under_way += size
        device.placed += size
        try:
            outcome = await device.store.write([items[index] for index in stripe])
        finally:
            device.under_way -= size
        for index, result in zip(stripe, outcome, strict=True):
            if isinstance(result, Extent):
                results[index] = extent = self._global(place, result)
                self._unreturned[extent] = True
            else:
                results[index] = result

    def _best_device(self) -> tuple[int, _Device]:
        """The device that has least to do, of those that work."""
        return min(self._open_devices(), key=lambda pair: (bool(pair[1].problem), pair[1].under_way, pair[1].placed))

    def _acknowledged(self, result: Extent | StorageError) -> Extent | StorageError:
        if isinstance(result, Extent) and not self._unreturned.pop(result):
            return StorageError(f"segment {result.segment} was given up before the batch of this block was done")
        return result

    async def _disown(self, items: Sequence[WriteItem], results: list[Extent | StorageError]) -> None:
        """The caller was cancelled and will never know these extents."""
        written = [
            (item.namespace, item.key, result)
            for item, result in zip(items, results, strict=False)
            if isinstance(result, Extent) and self._unreturned.pop(result)
        ]
        with contextlib.suppress(StorageError):  # then the tombstones are owed, and tried again with every write
            await self.delete(written)

    async def read(self, items: Sequence[ReadItem]) -> list[StorageError | None]:
        """See BlockStore.read: all devices at once."""
        errors: list[StorageError | None] = [None] * len(items)
        groups = self._by_device([item.extent for item in items])

        async def read_from(place: int, indices: list[int]) -> None:
            own = [dataclasses.replace(items[i], extent=self._own(items[i].extent)) for i in indices]
            for index, error in zip(indices, await self._devices[place].store.read(own), strict=True):
                errors[index] = error

        await uninterrupted(_all(read_from(place, indices) for place, indices in groups.items()))
        return errors

    async def read_layers(self, parts: LayerParts) -> dict[int, StorageError]:
        """See BlockStore.read_layers: all devices at once."""
        errors: dict[int, StorageError] = {}
        places = parts.extents.segment % len(self._devices)

        async def read_from(place: int) -> None:
            mine = np.flatnonzero(places == place)
            own = parts.take(mine)
            numbers = own.extents.segment // np.uint32(len(self._devices))
            own.extents = dataclasses.replace(own.extents, segment=numbers)
            found = await self._devices[place].store.read_layers(own)
            parts.sums[mine] = own.sums
            errors.update((int(mine[i]), error) for i, error in found.items())

        await uninterrupted(_all(read_from(place) for place in np.unique(places).tolist()))
        return errors

    async def delete(self, items: Sequence[tuple[bytes, bytes, Extent]]) -> None:
        """See BlockStore.delete."""
        groups = self._by_device([extent for _, _, extent in items])
        await uninterrupted(
            _all(
                self._devices[place].store.delete([(*items[i][:2], self._own(items[i][2])) for i in indices])
                for place, indices in groups.items()
            )
        )

    async def flush(self) -> None:
        """See BlockStore.flush: every device is flushed, also when one of them fails."""
        await _all(device.store.flush() for _, device in self._open_devices())

    async def close(self) -> None:
        """Close every device; the first failure is raised at the end."""
        await uninterrupted(self._close_all())

    async def _close_all(self) -> None:
        await _all(device.store.close() for device in self._devices)

    def stats(self) -> dict[str, int | str]:
        """Sums over the devices; the state names those that do not work."""
        parts = [device.store.stats() for _, device in self._open_devices()]
        return combine(parts, [f"{device.directory}: {device.problem}" for device in self._devices if device.problem])

    def _open_devices(self) -> list[tuple[int, _Device]]:
        found = [(place, device) for place, device in enumerate(self._devices) if not device.cause]
        if not found:
            raise StorageError("no device of the nvme tier is open")
        return found

    def _by_device(self, extents: Sequence[Extent]) -> dict[int, list[int]]:
        """Indices of extents by the place of their device."""
        groups: dict[int, list[int]] = {}
        for index, extent in enumerate(extents):
            groups.setdefault(extent.segment % len(self._devices), []).append(index)
        return groups

    def _own(self, extent: Extent) -> Extent:
        return Extent(extent.segment // len(self._devices), extent.offset, extent.length)

    def _global(self, place: int, extent: Extent) -> Extent:
        return Extent(extent.segment * len(self._devices) + place, extent.offset, extent.length)


def _stripes(items: Sequence[WriteItem], indices: list[int]) -> list[list[int]]:
    """Cut a batch into pieces of about STRIPE_BYTES, in order."""
    stripes: list[list[int]] = []
    room = 0
    for index in indices:
        size = items[index].data.size
        if not stripes or size > room:
            stripes.append([])
            room = max(STRIPE_BYTES, size)
        stripes[-1].append(index)
        room -= size
    return stripes


async def _all(works: Iterable[Awaitable[object]]) -> None:
    """Do all of them to their end, then raise the first failure."""
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


def make_store(settings: Nvme, *, clock: Clock) -> SegmentStore | StripedStore:
    """The nvme tier of the settings: one store, or one for each of several directories that share the capacity."""
    directories = split_folders(settings.directory)
    if len(directories) < 2:
        return SegmentStore(settings, clock=clock)
    shared = settings.capacity // len(directories)
    stores = []
    for directory in directories:
        own = msgspec.structs.replace(settings, directory=directory, capacity=shared)
        stores.append((str(Path(directory)), SegmentStore(own, clock=clock)))
    return StripedStore(stores)
