"""Device memory to work in, beside the pool: what goes up and comes back with a call, and what only kernels see."""

from __future__ import annotations

import dataclasses
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtierd.core.checksum import Bytes
from kvtierd.core.units import MIB, align_up
from kvtierd.gpu.attend import Array
from kvtierd.gpu.cuda_interface import Allocation, View

if TYPE_CHECKING:
    from kvtierd.gpu.cuda_device import CudaDevice

ALIGNMENT = 256
"""Of every array: as of CUDA's own allocations."""
SEGMENT_BYTES = 4 * MIB
"""Of what a call takes along: a decode step takes some tens of KiB, many queries of many heads take more of these."""


@dataclasses.dataclass(slots=True, eq=False)
class _Segment:
    """As much memory here as there; `used` counts in both."""

    here: Bytes
    there: Allocation
    used: int = 0


class Mirror:
    """Arrays that lie at the same place in pinned host memory and in device memory, until `reset`."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._segments: list[_Segment] = []

    def put(self, arrays: tuple[Array, ...], stream: Any) -> list[View]:
        """Have these arrays brought to the device, in one copy that begins now; where kernels find each."""
        sizes = [align_up(array.nbytes, ALIGNMENT) for array in arrays]
        segment = self._segment(sum(sizes))
        first, views = segment.used, []
        for array, size in zip(arrays, sizes, strict=True):
            segment.here[segment.used : segment.used + array.nbytes] = array.reshape(-1).view(np.uint8)
            views.append(View(segment.there.pointer + segment.used, array.size, array.dtype.str))
            segment.used += size
        self._copy(segment, first, segment.used - first, stream, inwards=True)
        return views

    def fetch(self, views: list[View], stream: Any) -> None:
        """Begin to bring back what the device has made of neighbouring arrays; `here` has them once that is done."""
        segment = self._of(views[0])
        first = views[0].pointer - segment.there.pointer
        end = views[-1].pointer - segment.there.pointer + _bytes_of(views[-1])
        self._copy(segment, first, end - first, stream, inwards=False)

    def here(self, view: View) -> Array:
        """The host's side of an array."""
        segment = self._of(view)
        first = view.pointer - segment.there.pointer
        return segment.here[first : first + _bytes_of(view)].view(view.dtype)

    def reset(self) -> None:
        """Nothing of it is needed any more, and nothing uses it: keep one segment of the usual size."""
        kept = [segment for segment in self._segments if segment.here.size == SEGMENT_BYTES][:1]
        self._free([segment for segment in self._segments if segment not in kept])
        for segment in kept:
            segment.used = 0
        self._segments = kept

    def close(self) -> None:
        """Give all memory back."""
        self._free(self._segments)
        self._segments = []

    def _segment(self, count: int) -> _Segment:
        for segment in self._segments:
            if segment.used + count <= segment.here.size:
                return segment
        size = align_up(max(count, SEGMENT_BYTES), SEGMENT_BYTES)
        there = self._device.runtime.allocate(self._device.gpu, size)
        here = np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
        self._device.register_host(here)  # where that is refused copies are slower and as right
        self._segments.append(_Segment(here, there))
        return self._segments[-1]

    def _of(self, view: View) -> _Segment:
        return next(
            segment
            for segment in self._segments
            if segment.there.pointer <= view.pointer < segment.there.pointer + segment.here.size
        )

    def _copy(self, segment: _Segment, first: int, count: int, stream: Any, *, inwards: bool) -> None:
        there, here = segment.there.pointer + first, int(segment.here.ctypes.data) + first
        self._device.begin_copy(there, here, count, stream, inwards=inwards)

    def _free(self, segments: list[_Segment]) -> None:
        for segment in segments:
            self._device.unregister_host(segment.here)
            self._device.runtime.free(self._device.gpu, segment.there)


class Room:
    """Device memory of which only the last size asked for counts; what was in it is lost when it grows."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._memory: Allocation | None = None
        self._size = 0

    def need(self, count: int) -> int:
        """Address of at least so many bytes. Nothing may use the room but what is in order behind this, on a stream:
        giving memory back waits for the device."""
        if self._memory is None or self._size < count:
            self.close()
            size = align_up(count, MIB)
            self._memory = self._device.runtime.allocate(self._device.gpu, size)
            self._size = size
        return self._memory.pointer

    def close(self) -> None:
        """Give it back."""
        if self._memory is not None:
            self._device.runtime.free(self._device.gpu, self._memory)
        self._memory, self._size = None, 0


def _bytes_of(view: View) -> int:
    return view.count * np.dtype(view.dtype).itemsize
