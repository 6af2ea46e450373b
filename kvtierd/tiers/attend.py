"""Exact attention over the blocks of a sequence in any tier (Attend).

Copies in gpu and host are computed where they lie; what lies in nvme streams through the staging ring, one layer's part
a block, so that memory is bounded whatever the context. While some parts are computed the next ones are on their way.
Parts may come in any order: what is carried between them is a maximum and sums (kvtierd.gpu.attend).

Compute runs in threads of its own, without the GIL, in pieces of about 5 ms: between two pieces of a request those of
others have their turn, small ones of several requests run side by side (kvtierd.tiers.attend_turns), and a request that
nobody waits for any more ends.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import numpy as np

from kvtierd.config.fields import split_folders
from kvtierd.config.schema import Settings
from kvtierd.core.clock import Clock
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.units import KIB
from kvtierd.gpu.attend import Array, AttentionDevice
from kvtierd.gpu.device import DeviceError
from kvtierd.protocol.messages import Attend, AttendReply
from kvtierd.protocol.service import Answer, Session
from kvtierd.storage.interface import BlockStore
from kvtierd.tiers.attend_fetch import PartFetcher
from kvtierd.tiers.attend_kernels import Preparation
from kvtierd.tiers.attend_layer import LayerWork, Tally
from kvtierd.tiers.attend_places import Fidelity, Numbers, Place
from kvtierd.tiers.attend_request import LayerQuery, check_shape, queries_of
from kvtierd.tiers.attend_ring import StagingRing
from kvtierd.tiers.attend_stream import Depth, Stream
from kvtierd.tiers.attend_times import AttendTimes
from kvtierd.tiers.attend_turns import Turns
from kvtierd.tiers.later_kernels import load
from kvtierd.tiers.leases import SESSION_SHARE
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.room import Room
from kvtierd.tiers.sequences import OpenedSequence, Sequences
from kvtierd.tiers.workers import Workers

Frames = Sequence[memoryview]
T = TypeVar("T")

_log = logging.getLogger(__name__)

JOBS_BEYOND_THREADS = 2
"""Jobs beyond two for each I/O thread, of which one is read and the other waits for its turn: what is computed. The
disk must find its next job without waiting for the loop, which comes for those that have arrived when it can."""

FEW_QUERY_BYTES = 64 * KIB
"""Queries that the loop looks at itself, for some 0.1 ms: a thread may not have its turn for milliseconds, and no read
begins before."""


class Attention:
    """Serves Attend. `sequences` has what it is asked about."""

    def __init__(
        self,
        settings: Settings,
        room: Room,
        sequences: Sequences,
        store: BlockStore | None,
        workers: Workers,
        clock: Clock,
    ) -> None:
        self._copies = copies = room.copies
        self._pressure = room.pressure
        self._clock = clock
        self.sequences = sequences
        sequences.on_open, sequences.on_close = self._get_ready, self._forget_ahead
        self._limit = settings.attention.max_requests
        self._running: collections.Counter[int] = collections.Counter()
        self.ring = StagingRing(settings.attention.staging_bytes)
        self.ring.on_pressure = self._shed_one
        self._times = AttendTimes(clock)
        self._fetcher = PartFetcher(copies, store, workers, self.ring, self._times)
        self._threads = settings.worker_threads
        self._compute = Turns(self._threads, workers.progress, copies.counters)
        self._device_made: AttentionDevice | None = None
        self._preparation = Preparation(workers.progress)
        self._warming: set[asyncio.Task[None]] = set()
        devices = len(split_folders(settings.nvme.directory)) or 1
        self._depth = Depth(2 * settings.nvme.io_threads * devices + JOBS_BEYOND_THREADS, 0, devices)
        self._ahead: dict[int, Stream] = {}
        """By sequence: what was begun of the layer that is likely to be asked next; the oldest first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.apply(settings)

    def apply(self, settings: Settings) -> None:
        """Take over what may change while the daemon runs."""
        self._depth.blocks = settings.kv_cache_config.prefetch_window

    def attend(self, session: Session, request: Attend, frames: Frames) -> Awaitable[Answer]:
        """Compute; the answer is whole or an error."""
        sequence = self.sequences.get(session, request.sequence)
        check_shape(request, sequence, frames)
        if not sequence.rows.size:
            raise RequestError(ErrorCode.BAD_ARGUMENT, f"sequence {sequence.id} has no blocks; extend it first")
        if sequence.entry.geometry.layer_stride > self.ring.size_bytes:
            raise RequestError(
                ErrorCode.TOO_LARGE,
                f"a layer of a block has {sequence.entry.geometry.layer_stride} bytes and attention.staging_bytes is "
                f"{self.ring.size_bytes}; raise it",
            )
        return self._attend(session, sequence, request, frames)

    def close_session(self, session: Session) -> None:
        """A client is gone: its sequences end. Its requests are cancelled by the server."""
        self.sequences.session_ended(session)

    async def close(self) -> None:
        """Wait for what is on its way, and end the thread."""
        for stream in list(self._ahead.values()):
            stream.close()
        self._ahead.clear()
        if self._device_made is not None:
            self._device_made.stop_preparing()
        while waiting := {*self._tasks, *self._warming}:
            await asyncio.wait(waiting)
        await self._preparation.close()
        self._compute.close()

    def stats(self) -> dict[str, int]:
        """Gauges by name."""
        return {
            **self.sequences.stats(),
            **self._times.stats(),
            "attend_running": self._running.total(),
            "attend_staging_bytes": self.ring.size_bytes,
            "attend_staging_used_bytes": self.ring.used_bytes,
        }

    async def _attend(self, session: Session, sequence: OpenedSequence, request: Attend, frames: Frames) -> Answer:
        self._admit(session)
        if sequence.closed:  # between being asked for and being begun; what it held has been given back
            raise RequestError(ErrorCode.NOT_YOURS, f"sequence {sequence.id} ended before attention over it began")
        begin_ns, counters, tally = self._clock.now_ns(), self._copies.counters, Tally()
        self._running[session.id] += 1
        self.sequences.begin_call(sequence)
        try:
            geometry, tokens = sequence.entry.geometry, sequence.tokens
            await self._ready(sequence.entry)
            check = functools.partial(queries_of, request, geometry, tokens, frames)
            few = sum(frame.nbytes for frame in frames) <= FEW_QUERY_BYTES
            asked = check() if few else await self._compute.run(check)
            dtype = request.output or request.dtype
            answers: list[Array] = []
            fidelity = self._fidelity_of(request, sequence)
            for query in asked:
                answers += await self._layer(sequence, query, dtype, tally, fidelity)
            counters["attend_requests"] += 1
            return _answer(answers, tally)
        except RequestError:
            counters["attend_failed"] += 1
            raise
        except DeviceError as error:
            counters["attend_failed"] += 1
            _log.error("attention cannot be computed: %s", error)
            raise RequestError(ErrorCode.UNAVAILABLE, f"attention cannot be computed: {error}") from error
        finally:
            self.sequences.end_call(sequence)
            self._running[session.id] -= 1
            if not self._running[session.id]:
                del self._running[session.id]
            counters["attend_ns"] += self._clock.now_ns() - begin_ns
            self._count(sequence, tally)

    def _admit(self, session: Session) -> None:
        mine = self._running[session.id]
        if self._running.total() >= self._limit or mine >= max(1, self._limit // SESSION_SHARE):
            message = f"{mine} attends of this session and {self._running.total()} of all are being worked on"
            raise RequestError(ErrorCode.BUSY, message, retry_after_ms=20)

    def _fidelity_of(self, request: Attend, sequence: OpenedSequence) -> Fidelity:
        """Which copies a request may be computed from: said once, for all of its layers."""
        if request.loss == "none":
            return Fidelity.EXACT
        if request.loss == "any" or self._pressure.thrashes(self._copies.host_class(sequence.entry)):
            return Fidelity.ANY
        return Fidelity.EXACT_FIRST

    async def _layer(
        self, sequence: OpenedSequence, query: LayerQuery, dtype: str, tally: Tally, fidelity: Fidelity
    ) -> list[Array]:
        work = LayerWork(self, self._copies, sequence, query, tally, fidelity)
        try:
            return await work.run(dtype)
        finally:
            work.close()

    @property
    def device(self) -> AttentionDevice:
        """What computes; a request makes sure that it is there."""
        assert self._device_made is not None, "a request loads the kernels first"
        return self._device_made

    async def _ready(self, entry: NamespaceEntry) -> None:
        """Have the kernels for blocks of a namespace; at once where they are there."""
        if self._device_made is None:
            await self._compute.run(self._make_device)
        await self._preparation.ready(self.device, entry)

    def _get_ready(self, entry: NamespaceEntry) -> None:
        """A sequence was opened, which will be attended to: load the kernels meanwhile."""
        made = self._device_made
        if not self._warming and (made is None or made.to_prepare(entry.geometry, lossy=entry.allow_loss)):
            task = asyncio.create_task(self._ready(entry))
            self._warming.add(task)
            task.add_done_callback(self._got_ready)

    def _got_ready(self, task: asyncio.Task[None]) -> None:
        self._warming.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), DeviceError):
            _log.warning("attention is not ready; the next request tries again: %s", error)

    def _make_device(self) -> None:
        if self._device_made is None:
            host = load("kvtierd.gpu.attend_host")
            limit = host.thread_limit()
            made: AttentionDevice = host.HostAttention(min(self._threads or limit, limit))
            if (gpu := self._copies.gpu) is not None:
                made = gpu.device.attention(made)
            made.adopt(self.ring.memory)
            self._device_made = made

    async def run(self, piece: Callable[[], T], work: int = 0) -> T:
        """Run a piece of work when it is its turn to compute (kvtierd.tiers.attend_turns)."""
        return await self._times.compute.of(self._compute.run(piece, work))

    def stream(self, sequence: OpenedSequence, layer: int, numbers: Numbers, fidelity: Fidelity) -> Stream:
        """Have the parts of these blocks brought, with what has come ahead."""
        ahead = self._ahead.pop(sequence.id, None)
        if ahead is not None and (ahead.layer, ahead.fidelity) == (layer, fidelity):
            ahead.adopt(numbers)
            return ahead
        if ahead is not None:
            self._wasted(ahead.close())
        stream = self._new_stream(sequence, layer, numbers, fidelity)
        stream.start()
        return stream

    def look_ahead(self, sequence: OpenedSequence, layer: int, numbers: Numbers, fidelity: Fidelity) -> None:
        """All that is wanted of a layer is on its way: begin with the next one, as far as the ring has room."""
        following = self._ahead.get(sequence.id)
        if following is None:
            if layer + 1 >= sequence.entry.geometry.layers or sequence.closed or not numbers.size:
                return
            following = self._ahead[sequence.id] = self._new_stream(sequence, layer + 1, numbers, fidelity)
        following.grow()

    def _new_stream(self, sequence: OpenedSequence, layer: int, numbers: Numbers, fidelity: Fidelity) -> Stream:
        return Stream(
            sequence,
            layer,
            numbers,
            ring=self.ring,
            depth=self._depth,
            line=self._copies.under_way,
            in_nvme=self._fetcher.count_in_nvme,
            fetch=self._fetcher.fetch,
            tasks=self._tasks,
            fidelity=fidelity,
        )

    def _shed_one(self) -> bool:
        """A request needs room in the ring: give up what nobody waits for."""
        for number in list(self._ahead):
            stream = self._ahead[number]
            wasted = stream.shed()
            if stream.ended:
                del self._ahead[number]
            if wasted:
                self._wasted(wasted)
                return True
        return False

    def _forget_ahead(self, sequence: OpenedSequence) -> None:
        if (ahead := self._ahead.pop(sequence.id, None)) is not None:
            self._wasted(ahead.close())

    def _wasted(self, count: int) -> None:
        self._copies.counters["attend_wasted_bytes"] += count

    def _count(self, sequence: OpenedSequence, tally: Tally) -> None:
        counters, size = self._copies.counters, sequence.entry.geometry.layer_bytes
        counters["attend_gpu_bytes"] += tally.parts[Place.GPU] * size
        counters["attend_host_bytes"] += tally.parts[Place.HOST] * size
        counters["attend_nvme_bytes"] += tally.nvme_bytes


def _answer(answers: list[Array], tally: Tally) -> Answer:
    reply = AttendReply(
        id=0,
        gpu_parts=tally.parts[Place.GPU],
        host_parts=tally.parts[Place.HOST],
        nvme_parts=tally.parts[Place.NVME],
        nvme_bytes=tally.nvme_bytes,
    )
    frames = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in answers]
    lossy = np.array(sorted(tally.lossy), "<u4").tobytes()
    # The arrays are this answer's own and never change: ZeroMQ may send them from where they lie.
    return Answer(reply, [*frames, lossy], on_sent=lambda: None)
