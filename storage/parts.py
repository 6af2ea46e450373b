"""Reading parts that lie apart from each other: as one batch of requests where the file takes them, else one by one."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from kvtierd.core.checksum import Bytes
from kvtierd.storage.aio import AsyncReads, Numbers
from kvtierd.storage.buffers import Scratch, address, is_aligned
from kvtierd.storage.io import SegmentFile, read_exact

_REFUSED = frozenset({errno.EAGAIN, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})
"""What says that a request cannot be made in this way, and nothing about the disk."""


@runtime_checkable
class Queueing(Protocol):
    """A file whose reads the kernel takes in batches."""

    @property
    def queue_descriptor(self) -> int:
        """The descriptor to read from; -1 where batches would not be read at once."""
        ...


@dataclasses.dataclass(slots=True)
class PartRead:
    """One part: whole pages at `offset` of a file, into memory ([size] uint8). `error` is why it did not come."""

    file: SegmentFile
    out: Bytes
    offset: int
    error: OSError | None = None


def read_parts(reads: Sequence[PartRead], scratch: Scratch) -> None:
    """Fill all of them; one that cannot be read does not hold up the others."""
    left = list(reads)
    if len(reads) > 1 and (queue := _queue_of(scratch)) is not None:
        descriptors = _descriptors(reads)
        batch = [read for read, descriptor in zip(reads, descriptors, strict=True) if descriptor >= 0]
        if batch:
            _read_batch(queue, batch, descriptors[descriptors >= 0])
        left = [read for read, own in zip(reads, descriptors, strict=True) if own < 0 or _must_repeat(read)]
    for read in left:
        read.error = None
        try:
            read_exact(read.file, [read.out], read.offset, scratch)
        except OSError as error:
            read.error = error


def _read_batch(queue: AsyncReads, reads: Sequence[PartRead], descriptors: Numbers) -> None:
    sizes = np.array([read.out.size for read in reads], np.int64)
    addresses = np.array([address(read.out) for read in reads], np.uint64)
    found = queue.read(descriptors, addresses, sizes, np.array([read.offset for read in reads], np.int64))
    for i in np.flatnonzero(found != sizes).tolist():
        number = max(0, -int(found[i]))
        text = os.strerror(number) if number else f"short read: {found[i]} of {sizes[i]} bytes"
        reads[i].error = OSError(number, text)


def _must_repeat(read: PartRead) -> bool:
    """Whether it is to be read in the ordinary way: it ended short, or the system does not take it in a batch."""
    return read.error is not None and (not read.error.errno or read.error.errno in _REFUSED)


def _descriptors(reads: Sequence[PartRead]) -> Numbers:
    """Where each is read from in a batch, [n]; -1 where it is not."""
    files = {id(read.file): read.file for read in reads}
    by_file = {key: file.queue_descriptor if isinstance(file, Queueing) else -1 for key, file in files.items()}
    return np.array(
        [by_file[id(read.file)] if is_aligned(read.out, read.file.alignment) else -1 for read in reads], np.int64
    )


def _queue_of(scratch: Scratch) -> AsyncReads | None:
    """This thread's queue; None where the system has none for us, which is asked once."""
    if not scratch.queue_asked:
        scratch.queue_asked = True
        try:
            scratch.queue = AsyncReads()
        except OSError:
            scratch.queue = None
    return scratch.queue
