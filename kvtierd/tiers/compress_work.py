"""Encoding and decoding blocks layer by layer, in worker threads: what the loop plans and never does itself.

Bytes are always hashed after they were read by the codec: should memory change under it, the sums do not match, and
what came of it is not used. A new sum is only ever made of bytes whose old sum was right.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Bytes, Sums
from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import EncodedLayout
from kvtierd.index.xxh3 import sums_of_parts
from kvtierd.tiers.compress_forms import Errors
from kvtierd.tiers.later_kernels import load

if TYPE_CHECKING:
    from kvtierd.gpu.codec import BlockCodec

PIECE_BYTES = 4 << 20
"""Exact bytes of one job in a thread: a millisecond, so that reads come between and a stop is quick."""

AT_ONCE = 2
"""Jobs of a batch that are with the threads at a time: while one is done the next is there, and does not wait for the
loop's turn, which on a busy machine takes longer than the job."""

_scratch = threading.local()


@dataclasses.dataclass(frozen=True, slots=True)
class Shapes:
    """What a block of one geometry measures in both forms."""

    geometry: Geometry
    form: EncodedLayout

    @property
    def errors(self) -> slice:
        """Where in a layer's stored form its errors lie."""
        return slice(self.form.errors_offset, self.form.layer_bytes)


@functools.lru_cache(maxsize=256)
def shapes_of(geometry: Geometry) -> Shapes:
    """The shapes of a geometry, which must have an FP8 form (ValueError)."""
    return Shapes(geometry, EncodedLayout(geometry))


@functools.lru_cache(maxsize=256)
def codec_of(geometry: Geometry) -> BlockCodec:
    """The codec of a single layer of blocks of a geometry. For threads: the first one loads the codec's kernels."""
    codec: BlockCodec = load("kvtierd.gpu.codec").BlockCodec(msgspec.structs.replace(geometry, layers=1))
    return codec


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """Errors of encoded blocks: over how many groups with a finite error, their sum of relative L2, and the largest."""

    groups: int
    relative_l2: float
    largest: float


@dataclasses.dataclass(slots=True, eq=False)
class Encoding:
    """One block to encode: `source` [slot_bytes] of the exact form, `target` of the other; the sums of both, [layers].

    `errors` are those of an earlier encoding, [layers, 2 x groups], to be carried on. `good` is False as soon as the
    source is not what its sums say; `loss` is known when all is encoded.
    """

    source: Bytes
    target: Bytes
    old_sums: Sums
    new_sums: Sums
    errors: Errors | None = None
    good: bool = True
    loss: Loss = Loss(0, 0.0, 0.0)


@dataclasses.dataclass(slots=True, eq=False)
class Decoding:
    """One block to decode, as `Encoding`; `source` may be the end of `target`. `errors` receives what encoding lost."""

    source: Bytes
    target: Bytes
    old_sums: Sums
    new_sums: Sums
    errors: Errors
    good: bool = True


def pieces(layers: int, layer_bytes: int, blocks: int) -> Iterator[list[tuple[int, int, int]]]:
    """Jobs of about PIECE_BYTES: lists of (block, first layer, end of layers), in order."""
    job: list[tuple[int, int, int]] = []
    room = most = max(1, PIECE_BYTES // layer_bytes)
    for block in range(blocks):
        first = 0
        while first < layers:
            end = min(layers, first + room)
            job.append((block, first, end))
            room -= end - first
            first = end
            if not room:
                yield job
                job, room = [], most
    if job:
        yield job


def strings(jobs: Iterable[list[tuple[int, int, int]]]) -> Iterator[list[list[tuple[int, int, int]]]]:
    """Jobs that must be done one after the other: those that go on with a block that another has begun."""
    string: list[list[tuple[int, int, int]]] = []
    for job in jobs:
        if string and string[-1][-1][0] != job[0][0]:
            yield string
            string = []
        string.append(job)
    if string:
        yield string


async def in_pieces(
    run: Callable[[Callable[[], None]], Awaitable[None]],
    work: Callable[[int, int, int], None],
    layers: int,
    layer_bytes: int,
    blocks: int,
) -> None:
    """Have `run` (kvtierd.tiers.workers) do `work(block, first, end)` for all layers of all blocks.

    AT_ONCE jobs are with it at a time, none of them about the same block, whose layers are done in order. Returns when
    none is any more, also where one has failed, which is then raised.
    """
    waiting, failed = strings(pieces(layers, layer_bytes, blocks)), list[Exception]()

    async def go_on() -> None:
        for string in waiting:
            for job in string:
                if failed:
                    return
                await run(functools.partial(_all_of, work, job))

    async def share() -> None:
        try:
            await go_on()
        except Exception as error:  # noqa: BLE001 - raised below, when the others have ended too
            failed.append(error)

    # With exceptions as results: a cancelled one would else end the wait for the other, whose thread is not done.
    await asyncio.gather(*(share() for _ in range(AT_ONCE)), return_exceptions=True)
    if failed:
        raise failed[0]


def _all_of(work: Callable[[int, int, int], None], job: Sequence[tuple[int, int, int]]) -> None:
    for piece in job:
        work(*piece)


def encode(shapes: Shapes, item: Encoding, first: int, end: int) -> None:
    """Encode layers first..end-1 of a block and hash them."""
    size, stride, form = shapes.geometry.layer_bytes, shapes.geometry.layer_stride, shapes.form
    codec = codec_of(shapes.geometry)
    for layer in range(first, end):
        if not item.good:
            return
        exact = item.source[layer * stride : (layer + 1) * stride]
        coded = item.target[layer * form.layer_stride : (layer + 1) * form.layer_stride]
        codec.encode(exact, coded)
        item.good = _sum(exact, size) == item.old_sums[layer]
        if item.errors is not None:
            coded[shapes.errors] = item.errors[layer].view(np.uint8)
        item.new_sums[layer] = _sum(coded, form.layer_bytes)


def decode(shapes: Shapes, item: Decoding, first: int, end: int) -> None:
    """Decode layers first..end-1 of a block and hash them. Layers must be taken in order where memory is shared.

    The coded form at the end of the exact form's place is read before it is overwritten: a layer of it lies at or
    behind its exact form, and is set aside first.
    """
    size, stride, form = shapes.geometry.layer_bytes, shapes.geometry.layer_stride, shapes.form
    coded, codec = _aside(form.layer_stride), codec_of(shapes.geometry)
    for layer in range(first, end):
        if not item.good:
            return
        coded[:] = item.source[layer * form.layer_stride : (layer + 1) * form.layer_stride]
        item.good = _sum(coded, form.layer_bytes) == item.old_sums[layer]
        item.errors[layer] = coded[shapes.errors].view(np.float32)
        exact = item.target[layer * stride : (layer + 1) * stride]
        codec.decode(coded, exact)
        item.new_sums[layer] = _sum(exact, size)


def _sum(part: Bytes, size: int) -> int:
    """xxh3-64 of the first bytes of a layer's part, without the GIL: the loop does not wait for it."""
    return sums_of_parts([part], size)[0]


def loss_of(shapes: Shapes, encoded: Sequence[Bytes]) -> Loss:
    """What encoding these blocks lost; groups with Inf in them have no finite error and are left out."""
    groups, total, largest = 0, 0.0, 0.0
    for block in encoded:
        rows = block.reshape(shapes.form.layers, shapes.form.layer_stride)[:, shapes.errors].view(np.float32)
        relative, worst = rows[:, : shapes.form.groups], rows[:, shapes.form.groups :]
        finite = np.isfinite(relative) & np.isfinite(worst)
        groups += int(np.count_nonzero(finite))
        total += float(relative[finite].sum(dtype=np.float64))
        largest = max(largest, float(worst[finite].max(initial=0.0)))
    return Loss(groups, total, largest)


def tail(slot: Bytes, form: EncodedLayout) -> Bytes:
    """The end of a slot, where the coded form is read to before it is decoded in place."""
    return slot[slot.size - form.slot_bytes :]


def _aside(size: int) -> npt.NDArray[np.uint8]:
    """This thread's memory for one layer."""
    memory: npt.NDArray[np.uint8] | None = getattr(_scratch, "memory", None)
    if memory is None or memory.size < size:
        memory = _scratch.memory = np.empty(size, np.uint8)
    return memory[:size]
