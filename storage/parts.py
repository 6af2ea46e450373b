"""Reading parts that lie apart from each other: as one batch of requests where the file takes them, else one by one."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtierd.core.checksum import Bytes
from kvtierd.storage.aio import AsyncReads, Numbers
from kvtierd.storage.buffers import Scratch
from kvtierd.storage.io import SegmentFile, read_exact

_REFUSED = frozenset({errno.EAGAIN, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})
"""What says that a request cannot be made in this way, and nothing about the disk."""

Errors = dict[int, OSError]


@dataclasses.dataclass(frozen=True, slots=True)
class PartReads:
    """Parts as columns, [n] each: `sizes` bytes at `offsets` (both int64) of the file at place `which` (int64) of
    `files`, into memory at `addresses` (uint64), which the caller keeps.

    A file whose reads the kernel takes in batches has an attribute `queue_descriptor`: the descriptor to read from, or
    -1 where batches would not be read at once.
    """

    files: Sequence[SegmentFile]
    which: Numbers
    addresses: npt.NDArray[np.uint64]
    sizes: Numbers
    offsets: Numbers

    def __len__(self) -> int:
        return self.sizes.size


def read_parts(reads: PartReads, scratch: Scratch) -> Errors:
    """Fill all of them: by index, why one did not come. It does not hold up the others."""
    errors: Errors = {}
    left = np.arange(len(reads))
    if len(reads) > 1 and (queue := _queue_of(scratch)) is not None:
        descriptors = _descriptors(reads)
        left = np.flatnonzero(descriptors < 0)
        if left.size < len(reads):
            again = _read_batch(queue, reads, descriptors, errors)
            left = np.concatenate([left, np.array(again, np.int64)])
    for i in left.tolist():
        try:
            out = _memory(int(reads.addresses[i]), int(reads.sizes[i]))
            read_exact(reads.files[reads.which[i]], [out], int(reads.offsets[i]), scratch)
        except OSError as error:
            errors[i] = error
    return errors


def _read_batch(queue: AsyncReads, reads: PartReads, descriptors: Numbers, errors: Errors) -> list[int]:
    """Read those that have a descriptor: which are to be read in the ordinary way, because they ended short or the
    system does not take them in a batch."""
    batch = np.flatnonzero(descriptors >= 0)
    sizes = reads.sizes[batch]
    found = queue.read(descriptors[batch], reads.addresses[batch], sizes, reads.offsets[batch])
    again = []
    for i in np.flatnonzero(found != sizes).tolist():
        number = max(0, -int(found[i]))
        if not number or number in _REFUSED:
            again.append(int(batch[i]))
        else:
            errors[int(batch[i])] = OSError(number, os.strerror(number))
    return again


def _descriptors(reads: PartReads) -> Numbers:
    """Where each is read from in a batch, [n]; -1 where it is not."""
    by_file = np.array([getattr(file, "queue_descriptor", -1) for file in reads.files], np.int64)
    alignments = np.array([file.alignment for file in reads.files], np.int64)[reads.which]
    aligned = (reads.addresses.view(np.int64) | reads.sizes) % alignments == 0
    return np.where(aligned, by_file[reads.which], -1)


def _memory(address: int, size: int) -> Bytes:
    memory: Any = (ctypes.c_uint8 * size).from_address(address)
    found: Bytes = np.frombuffer(memory, np.uint8)
    return found


def _queue_of(scratch: Scratch) -> AsyncReads | None:
    """This thread's queue; None where the system has none for us, which is asked once."""
    if not scratch.queue_asked:
        scratch.queue_asked = True
        try:
            scratch.queue = AsyncReads()
        except OSError:
            scratch.queue = None
    return scratch.queue
