"""Parts of blocks on their way into the staging ring: in jobs of a few parts each, as many at once as the disk can use.

A `Stream` brings one layer's parts of some blocks, in order of starting and in any order of arriving. With `ahead` it
takes only what is free of the ring, for a request that has not come yet; `adopt` makes it that request's own.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtierd.core.errors import StorageError
from kvtierd.core.stored_form import choose_codec, form_of
from kvtierd.core.units import MIB
from kvtierd.storage.layout import block_header_bytes
from kvtierd.tiers.attend_places import Codecs, Fidelity, Numbers
from kvtierd.tiers.attend_ring import StagingRing
from kvtierd.tiers.sequences import OpenedSequence

JOB_BYTES = 8 * MIB
"""Parts of a job: enough that the loop's own time for it is small against the disk's."""
JOBS_IN_RING = 8
"""Jobs that the ring has room for, at least: those that the disk works on, and those that are computed."""
SMALL_JOB_BYTES = 2 * MIB
"""Parts of the last jobs, if they are no larger themselves."""
FIRST_JOBS = 2
"""Jobs that each device is given before anything else is done: to make more of them takes the loop longer than the
device for these."""
LAST_JOBS = 4
"""The last jobs of a device are as many, and smaller and smaller: the disk has something to do until the end, and what
is left to compute then is little."""
HEADERS_MAX_BYTES = MIB
"""What an I/O thread has room for."""


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    """Parts of blocks `numbers` [k] of the sequence, one behind the other in a piece of the ring.

    Once it has arrived, `errors` says by index which of them are not good, `codecs` ([k], kvtierd.core.stored_form) in
    which form each is there, `places` ([k], `Place`) where it came from, and `lossy` ([k]) whether that copy had been
    through FP8. `counted` are those that count as blocks of their tenant on their way from nvme.
    """

    stream: Stream
    numbers: Numbers
    offset: int
    size: int
    codecs: Codecs
    places: Codecs
    lossy: npt.NDArray[np.bool_]
    counted: int = 0
    errors: dict[int, StorageError] = dataclasses.field(default_factory=dict)
    failure: BaseException | None = None


Fetch = Callable[[OpenedSequence, int, Job], Awaitable[None]]
"""Bring the parts of a job: sequence, layer, job."""

Count = Callable[[OpenedSequence, Numbers, Fidelity], int]
"""How many of these blocks of a sequence would be read from nvme now."""


class Line(Protocol):
    """Where reads from nvme wait if their tenant has too many under way (kvtierd.tiers.under_way)."""

    def most(self, tenant: str) -> int | None:
        """Most blocks at once; None for any number."""
        ...

    def try_enter(self, tenant: str, blocks: int) -> bool:
        """Set out now, or not."""
        ...

    async def enter(self, tenant: str, blocks: int) -> None:
        """Set out when there is room."""
        ...

    def leave(self, tenant: str, blocks: int) -> None:
        """They have come."""
        ...


@dataclasses.dataclass(slots=True)
class Depth:
    """How much may be on its way for one request: `jobs` at once, and at least `blocks` parts, from so many devices."""

    jobs: int
    blocks: int
    devices: int = 1


class Stream:
    """One layer's parts of some blocks of a sequence. All methods run on the loop; `close` comes last."""

    def __init__(
        self,
        sequence: OpenedSequence,
        layer: int,
        numbers: Numbers,
        *,
        ring: StagingRing,
        depth: Depth,
        line: Line,
        in_nvme: Count,
        fetch: Fetch,
        tasks: set[asyncio.Task[None]],
        fidelity: Fidelity = Fidelity.ANY,
    ) -> None:
        self.sequence, self.layer, self.fidelity = sequence, layer, fidelity
        self.part_bytes = sequence.entry.geometry.layer_stride
        self._ring, self._depth, self._fetch, self._tasks = ring, depth, fetch, tasks
        self._line, self._in_nvme, self._tenant = line, in_nvme, sequence.entry.tenant
        self._todo = collections.deque(self._batches(numbers))
        self._flying: set[Job] = set()
        self._ready: collections.deque[Job] = collections.deque()
        self._taken = 0
        self._changed = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._closed = False
        self.brought_bytes = 0

    @property
    def all_begun(self) -> bool:
        """Whether everything is on its way or there."""
        return not self._todo

    def start(self) -> None:
        """Bring the parts, waiting for room in the ring where there is none.

        The first jobs are with the disk when the loop has gone round once: nothing shall come before them.
        """
        self._begin(self._depth.devices * FIRST_JOBS)
        self._pump = asyncio.create_task(self._work())

    def grow(self) -> None:
        """Ahead of any request: begin what there is free room for, and no more at once than the disk can use."""
        if not self._closed:
            self._begin(self._depth.jobs)

    def _begin(self, jobs: int) -> None:
        """Begin what there is free room for, as long as fewer jobs are on their way."""
        while self._todo and len(self._flying) < jobs:
            numbers = self._todo[0]
            counted = self._counted(numbers)
            if not self._line.try_enter(self._tenant, counted):
                return
            offset = self._ring.try_take(numbers.size * self.part_bytes)
            if offset < 0:
                self._line.leave(self._tenant, counted)
                return
            self._launch(self._todo.popleft(), offset, counted)

    def adopt(self, numbers: Numbers) -> None:
        """A request has come that wants the parts of these blocks: bring the rest of them."""
        begun = np.concatenate([numbers[:0], *(job.numbers for job in (*self._ready, *self._flying))])
        rest = np.setdiff1d(numbers, begun, assume_unique=True)
        self._todo = collections.deque(self._batches(rest))
        self.start()

    def again(self, numbers: Numbers) -> None:
        """Bring the parts of these blocks once more, from wherever they are now."""
        self._todo.extend(self._batches(numbers))
        if self._pump is None or self._pump.done():
            self.start()

    def poll(self) -> list[Job]:
        """The jobs that have arrived, if any; `done` must follow for each. A failure of one is raised here."""
        jobs = list(self._ready)
        self._ready.clear()
        self._taken += len(jobs)
        failed = next((job for job in jobs if job.failure is not None), None)
        if failed is not None and failed.failure is not None:
            for job in jobs:
                self.done(job)
            raise failed.failure
        return jobs

    @property
    def ended(self) -> bool:
        """Whether nothing more will arrive."""
        pumping = self._pump is not None and not self._pump.done()
        return not (self._ready or self._flying or self._todo or pumping)

    async def wait(self) -> None:
        """Return when something has arrived or there is nothing to wait for."""
        while not self._ready and not self.ended:
            self._changed.clear()
            await self._changed.wait()

    def done(self, job: Job) -> None:
        """The parts of a job are not needed any more."""
        self._taken -= 1
        self._ring.give(job.offset, job.size)
        self._changed.set()

    def shed(self) -> int:
        """Give up what has arrived, and start nothing more; bytes that came for nothing."""
        self._todo.clear()
        wasted = 0
        while self._ready:
            job = self._ready.popleft()
            wasted += job.size
            self._ring.give(job.offset, job.size)
        return wasted

    def close(self) -> int:
        """Nobody wants anything any more; what is on its way gives its room back when it arrives."""
        self._closed = True
        if self._pump is not None:
            self._pump.cancel()
        return self.shed() + sum(job.size for job in self._flying)

    async def _work(self) -> None:
        try:
            while self._todo:
                while self._taken + len(self._flying) + len(self._ready) >= self._jobs_at_once():
                    self._changed.clear()
                    await self._changed.wait()
                if not self._todo:
                    break
                await self._next()
        finally:
            # Seen after this task is done: whoever waits asks `ended`.
            asyncio.get_running_loop().call_soon(self._changed.set)

    def _batches(self, numbers: Numbers) -> list[Numbers]:
        """Cut blocks into jobs: of a fair size, the last ones smaller and smaller, never more than their share
        of the ring, nor more than their tenant may have under way."""
        read = self._least_part_bytes()
        most = max(1, min(JOB_BYTES // read, self._ring.size_bytes // JOBS_IN_RING // self.part_bytes))
        headers = max(1, HEADERS_MAX_BYTES // block_header_bytes(self.sequence.entry.geometry.layers))
        most = min(most, headers, self._line.most(self._tenant) or most)
        least = max(1, SMALL_JOB_BYTES // read)
        found, at = [], 0
        while at < numbers.size:
            fair = max(least, (numbers.size - at) // (LAST_JOBS * self._depth.devices))
            found.append(numbers[at : at + min(most, fair)])
            at += found[-1].size
        return found

    def _counted(self, numbers: Numbers) -> int:
        """How many of these count as on their way from nvme: where their tenant has no limit, nobody asks."""
        return 0 if self._line.most(self._tenant) is None else self._in_nvme(self.sequence, numbers, self.fidelity)

    def _least_part_bytes(self) -> int:
        """What a part takes where it is compressed, if it may be: a job is to be as much work for the disk then too."""
        geometry = self.sequence.entry.geometry
        codec = choose_codec(geometry, lossy=self.sequence.entry.allow_loss)
        return form_of(geometry, codec).layer_stride

    async def _next(self) -> None:
        """Begin the first of what is left, when its tenant may have it read and there is room for it."""
        numbers, size = self._todo[0], self._todo[0].size * self.part_bytes
        counted = self._counted(numbers)
        await self._line.enter(self._tenant, counted)
        try:
            offset = await self._ring.take(size)
        except BaseException:
            self._line.leave(self._tenant, counted)
            raise
        if self._todo and self._todo[0] is numbers:
            self._launch(self._todo.popleft(), offset, counted)
            return
        self._ring.give(offset, size)
        self._line.leave(self._tenant, counted)

    def _jobs_at_once(self) -> int:
        parts = max(1, self._todo[0].size) if self._todo else 1
        return max(self._depth.jobs, -(-self._depth.blocks // parts))

    def _launch(self, numbers: Numbers, offset: int, counted: int) -> None:
        plain = np.zeros(numbers.size, np.uint8)
        job = Job(
            self, numbers, offset, numbers.size * self.part_bytes, plain, plain.copy(), plain.astype(np.bool_), counted
        )
        self._flying.add(job)
        task = asyncio.create_task(self._bring(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring(self, job: Job) -> None:
        try:
            await self._fetch(self.sequence, self.layer, job)
            self.brought_bytes += job.size
        except Exception as error:  # noqa: BLE001 - raised where the job is taken
            job.failure = error
        finally:
            self._line.leave(self._tenant, job.counted)
            self._flying.discard(job)
            if self._closed:
                self._ring.give(job.offset, job.size)
            else:
                self._ready.append(job)
            self._changed.set()
            if self._pump is None:
                self._ring.look_again()
                self.grow()
