"""What several devices have, as one: columns joined, and a block that lies on two of them kept once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvtierd.storage.interface import Extent, Extents, Recovered

Kept = tuple[bytes, bytes, Extent]


def merge(
    found: Sequence[tuple[int, Recovered]], place_of: Callable[[int, Extent], Extent]
) -> tuple[Recovered, list[Kept]]:
    """Join (place of a device, what it has). `place_of` gives an extent its number among all devices.

    Returns what is there, and (digest, key, extent) of blocks of which another copy is kept: a store that was away for
    a while may have what has been stored elsewhere since. Both copies are whole, and either may be served.
    """
    digests = list(dict.fromkeys(digest for _, part in found for digest in part.digests))
    number = {digest: index for index, digest in enumerate(digests)}
    spaces = [
        np.array([number[digest] for digest in part.digests], np.int32)[part.space]
        if part.digests
        else np.empty(0, np.int32)
        for _, part in found
    ]
    columns = [_renumbered(place, part.extents, place_of) for place, part in found]
    extents = Extents(
        np.concatenate([column.segment for column in columns]),
        np.concatenate([column.page for column in columns]),
        np.concatenate([column.length for column in columns]),
    )
    space = np.concatenate(spaces)
    keys = np.concatenate([part.keys.reshape(-1, 32) for _, part in found])
    sums = np.concatenate([part.block_sums for _, part in found])
    codecs = np.concatenate([part.codecs for _, part in found])
    first, twice = _first_of_each(space, keys)
    dropped = [(digests[space[i]], keys[i].tobytes(), extents[int(i)]) for i in twice.tolist()]
    merged = Recovered(
        namespaces={digest: namespace for _, part in found for digest, namespace in part.namespaces.items()},
        digests=digests,
        space=space[first],
        keys=keys[first],
        extents=extents.take(first),
        block_sums=sums[first],
        codecs=codecs[first],
        source=", ".join(dict.fromkeys(part.source for _, part in found if part.source)),
        dropped=sum(part.dropped for _, part in found),
        notes=[note for _, part in found for note in part.notes],
    )
    return merged, dropped


def _renumbered(place: int, extents: Extents, place_of: Callable[[int, Extent], Extent]) -> Extents:
    """Segment numbers among all devices; `place_of` is asked once a segment."""
    numbers, inverse = np.unique(extents.segment, return_inverse=True)
    renamed = np.array([place_of(place, Extent(int(n), 0, 0)).segment for n in numbers], np.uint32)
    return Extents(renamed[inverse] if numbers.size else extents.segment, extents.page, extents.length)


def _first_of_each(space: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the first row of each (space, key), in order, and of the others."""
    rows = np.zeros(space.size, np.dtype([("space", "<i4"), ("key", "V32")]))
    rows["space"] = space
    rows["key"] = np.ascontiguousarray(keys).view("V32")[:, 0] if space.size else rows["key"]
    raw = rows.view(f"V{rows.dtype.itemsize}")
    _, first = np.unique(raw, return_index=True)
    first.sort()
    return first, np.setdiff1d(np.arange(space.size), first)
