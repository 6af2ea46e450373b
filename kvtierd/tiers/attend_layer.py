"""One layer of one request for attention: what is computed where it lies, and what is computed as it comes."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvtierd.core.errors import CorruptionError, ErrorCode, RequestError, StorageError
from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import form_of
from kvtierd.gpu.attend import Array, AttentionDevice, Partial
from kvtierd.gpu.attend import Blocks as Parts
from kvtierd.gpu.slot_pool import Slots
from kvtierd.storage.interface import DiskError
from kvtierd.tiers.attend_places import Addresses, Codecs, Fidelity, LayerForm, Numbers, Place, lossy_at, places_of
from kvtierd.tiers.attend_request import LayerQuery
from kvtierd.tiers.attend_ring import StagingRing
from kvtierd.tiers.attend_stream import Job, Stream
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.sequences import OpenedSequence, Sequences, hold, unhold

T = TypeVar("T")
Flags = npt.NDArray[np.bool_]


@dataclasses.dataclass(slots=True, eq=False)
class Tally:
    """Where the parts of a request lay."""

    parts: collections.Counter[Place] = dataclasses.field(default_factory=collections.Counter)
    nvme_bytes: int = 0
    lossy: set[int] = dataclasses.field(default_factory=set)

    def note_places(self, places: Codecs, codecs: Codecs, geometry: Geometry) -> None:
        """Parts were brought from here, in these forms."""
        on_disk = places == Place.NVME
        if on_disk.all() and not codecs.any():
            self.parts[Place.NVME] += places.size
            self.nvme_bytes += places.size * geometry.layer_stride
            return
        in_gpu = (places == Place.GPU) | (places == Place.GPU_ONLY)
        self.parts[Place.NVME] += int(np.count_nonzero(on_disk))
        self.parts[Place.GPU] += int(np.count_nonzero(in_gpu))
        self.parts[Place.HOST] += int(np.count_nonzero(~(on_disk | in_gpu)))
        for codec in np.unique(codecs[on_disk]).tolist():
            size = form_of(geometry, codec).layer_stride
            self.nvme_bytes += int(np.count_nonzero(codecs[on_disk] == codec)) * size


class Owner(Protocol):
    """What a layer's work needs of kvtierd.tiers.attend."""

    ring: StagingRing
    sequences: Sequences

    @property
    def device(self) -> AttentionDevice:
        """What computes."""
        ...

    async def run(self, piece: Callable[[], T], work: int = 0) -> T:
        """Run a piece of work when it is its turn; `work` is that of one which uses a single processor."""
        ...

    def stream(self, sequence: OpenedSequence, layer: int, numbers: Numbers, fidelity: Fidelity) -> Stream:
        """Have the parts of these blocks brought."""
        ...

    def look_ahead(self, sequence: OpenedSequence, layer: int, numbers: Numbers, fidelity: Fidelity) -> None:
        """All that is wanted of a layer is on its way."""
        ...


class LayerWork:
    """One layer of one request."""

    def __init__(
        self,
        owner: Owner,
        copies: Copies,
        sequence: OpenedSequence,
        query: LayerQuery,
        tally: Tally,
        fidelity: Fidelity,
    ) -> None:
        self._owner, self._copies, self._sequence, self._query, self._tally = owner, copies, sequence, query, tally
        self._fidelity = fidelity
        self._form = LayerForm(sequence.entry, query.layer)
        self._holds: list[tuple[Place, Slots]] = []
        self._stream: Stream | None = None
        self._tried: set[int] = set()
        self._missing = np.zeros(0, np.bool_)
        """Blocks whose parts are brought and have not been computed yet."""
        self._partials: list[Partial] = []

    async def run(self, dtype: str) -> list[Array]:
        """Output of that dtype and log-sum-exp over everything that the queries see."""
        here, brought = self._plan()
        self._missing = np.zeros(self._sequence.rows.size, np.bool_)
        self._missing[brought] = True
        self._stream = self._owner.stream(self._sequence, self._query.layer, brought, self._fidelity)
        await asyncio.sleep(0)  # the first reads are with the disk before anything takes the processors
        begin = self._owner.device.begin
        self._partials = await self._owner.run(lambda: [begin(part) for part in self._query.parts])
        await self._compute_all(self._stream, here, brought)
        return await self._owner.run(functools.partial(_results, self._partials, dtype))

    async def _compute_all(self, stream: Stream, here: Parts, brought: Numbers) -> None:
        """Compute what has arrived first, so that the ring has room again."""
        pieces = self._pieces(here)
        while True:
            if stream.all_begun:
                self._owner.look_ahead(self._sequence, self._query.layer, brought, self._fidelity)
            if jobs := stream.poll():
                await self._arrived(stream, jobs)
            elif (piece := next(pieces, None)) is not None:
                await self._owner.run(*piece)
            elif stream.ended:
                break
            else:
                await stream.wait()
        assert not self._missing.any(), f"{np.count_nonzero(self._missing)} parts never came"
        self._owner.look_ahead(self._sequence, self._query.layer, brought, self._fidelity)

    def close(self) -> None:
        """Let go of everything."""
        if self._stream is not None:
            self._stream.close()
        for place, slots in self._holds:
            unhold(self._copies, self._sequence.entry, place, slots)

    def _plan(self) -> tuple[Parts, Numbers]:
        """What is computed where it lies, held from here on, and the numbers of the blocks that must be brought."""
        sequence, span = self._sequence, self._query.span
        numbers = np.arange(span.begin, span.end)
        self._owner.sequences.keep(sequence, numbers)
        place, addresses = sequence.place[numbers], sequence.addresses[numbers]
        if self._fidelity is not Fidelity.ANY:
            place[lossy_at(self._copies, sequence.rows[numbers], place)] = Place.NOWHERE
        loose = np.flatnonzero(place == Place.NOWHERE)
        if loose.size:
            place[loose] = places_of(self._copies, sequence.rows[numbers[loose]], self._fidelity)
            for tier in (Place.GPU, Place.HOST):
                mine = np.flatnonzero(place == tier)
                mine = mine[sequence.place[numbers[mine]] != tier]
                if mine.size:
                    slots, addresses[mine] = hold(self._copies, sequence.entry, tier, sequence.rows[numbers[mine]])
                    self._holds.append((tier, slots))
            if (gone := numbers[place == Place.NOWHERE]).size:
                raise self._lost(int(gone[0]))
        here = place <= Place.HOST
        for tier in (Place.GPU, Place.HOST):
            self._tally.parts[tier] += int(np.count_nonzero(place == tier))
        mine = numbers[here]
        self._tally.lossy.update(mine[lossy_at(self._copies, sequence.rows[mine], place[here])].tolist())
        parts = self._form.in_slots(addresses[here], mine, self._tokens(mine), place[here])
        return parts, numbers[~here]

    def _tokens(self, numbers: Numbers) -> Numbers:
        size = self._form.geometry.block_size
        return np.minimum(size, self._query.span.length - numbers * size)

    def _pieces(self, here: Parts) -> Iterator[tuple[Callable[[], object], int]]:
        """What is to be run, and the work of each that uses a single processor."""
        device = self._owner.device
        for query, partial in zip(self._query.parts, self._partials, strict=True):
            for begin, end in device.pieces(query, here):
                work = device.work_of_one(query, here) if end - begin == len(here) else 0
                yield functools.partial(device.compute, partial, here, begin, end), work

    async def _arrived(self, stream: Stream, jobs: list[Job]) -> None:
        """Compute the parts of jobs, all that have arrived together: the busier the loop, the fewer pieces."""
        try:
            numbers, begins, codecs, places, lossy = self._columns_of(jobs, stream.part_bytes)
            # What was brought ahead may be computed where it lies by now, or be outside of what the queries see.
            wanted = self._missing[numbers]
            if errors := _errors_of(jobs):
                self._bring_again(stream, numbers, {i: error for i, error in errors.items() if wanted[i]})
                wanted[list(errors)] = False
            if not wanted.all():
                numbers, begins, codecs = numbers[wanted], begins[wanted], codecs[wanted]
                places, lossy = places[wanted], lossy[wanted]
            parts = self._form.of_parts(begins, codecs, numbers, self._tokens(numbers), Place.NVME)
            for piece in self._pieces(parts):
                await self._owner.run(*piece)
            self._tally.lossy.update(numbers[lossy].tolist())
            self._missing[numbers] = False
            self._tally.note_places(places, codecs, self._form.geometry)
        finally:
            for job in jobs:
                stream.done(job)

    def _columns_of(self, jobs: list[Job], step: int) -> tuple[Numbers, Addresses, Codecs, Codecs, Flags]:
        """Of the parts of these jobs: numbers, addresses in the ring, codecs, places, and which are lossy."""
        base = self._owner.ring.address(0)
        begins = [base + job.offset + step * np.arange(job.numbers.size) for job in jobs]
        if len(jobs) == 1:
            (job,) = jobs
            return job.numbers, begins[0].astype(np.uint64), job.codecs, job.places, job.lossy
        return (
            np.concatenate([job.numbers for job in jobs]),
            np.concatenate(begins).astype(np.uint64),
            np.concatenate([job.codecs for job in jobs]),
            np.concatenate([job.places for job in jobs]),
            np.concatenate([job.lossy for job in jobs]),
        )

    def _bring_again(self, stream: Stream, numbers: Numbers, errors: dict[int, StorageError]) -> None:
        """Some parts did not come: once more from where their blocks are by now, or an error that names the block."""
        for i, error in sorted(errors.items()):
            number = int(numbers[i])
            row = self._sequence.rows[number : number + 1]
            elsewhere = places_of(self._copies, row, self._fidelity)[0] != Place.NOWHERE
            if number in self._tried or not elsewhere or isinstance(error, CorruptionError | DiskError):
                raise self._lost(number, error)
            self._tried.add(number)
        if errors:
            stream.again(numbers[sorted(errors)])

    def _lost(self, number: int, error: StorageError | None = None) -> RequestError:
        name = self._sequence.key_of(self._copies, number)
        if isinstance(error, CorruptionError):
            return RequestError(ErrorCode.CHECKSUM_MISMATCH, f"{name} of the sequence is damaged: {error}")
        if isinstance(error, DiskError):
            return RequestError(ErrorCode.UNAVAILABLE, f"{name} of the sequence cannot be read: {error}")
        elsewhere = places_of(self._copies, self._sequence.rows[number : number + 1])[0]
        if self._fidelity is Fidelity.EXACT and elsewhere != Place.NOWHERE:
            message = f"{name} of the sequence has no exact copy any more; allow loss, or store it again"
            return RequestError(ErrorCode.NOT_PRESENT, message)
        return RequestError(ErrorCode.NOT_PRESENT, f"{name} of the sequence is in no tier any more")


def _errors_of(jobs: list[Job]) -> dict[int, StorageError]:
    """What went wrong with the parts of jobs, by their place among all of them."""
    found: dict[int, StorageError] = {}
    first = 0
    for job in jobs:
        found.update((first + i, error) for i, error in job.errors.items())
        first += job.numbers.size
    return found


def _results(partials: list[Partial], dtype: str) -> list[Array]:
    """Output and log-sum-exp over all queries."""
    found = [partial.result(dtype) for partial in partials]
    return [np.concatenate([output for output, _ in found]), np.concatenate([lse for _, lse in found])]
