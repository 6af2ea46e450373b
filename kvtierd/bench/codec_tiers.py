"""Part of `kvtierctl bench codec`: what compression saves in the tiers of a real daemon, and what it loses.

A client that allows loss stores blocks of normal deviates, flushes, and reads them back; bytes are the daemon's own
counts. The same blocks in a namespace that forbids loss are the reference for the bytes on nvme.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvtierd.bench.options import Options, need_memory, thread_count
from kvtierd.bench.rows import BenchError, Row, make_row
from kvtierd.bench.workload import daemon_and_client
from kvtierd.core.checksum import Bytes
from kvtierd.core.geometry import Geometry
from kvtierd.core.keys import block_keys
from kvtierd.core.namespace import Namespace
from kvtierd.core.stored_form import Codec
from kvtierd.core.units import MIB
from kvtierd.protocol.client import Client


def tier_rows(options: Options, shape: Geometry) -> Iterator[Row]:
    """Store, flush and fetch through a daemon. Raises BenchError where a block does not come back as it should."""
    count = options.rounds(32, 16)
    need_memory(8 * count * shape.slot_bytes)
    capacity = 4 * count * shape.slot_bytes + 256 * MIB
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        settings = {"host__capacity": f"{capacity}", "nvme__capacity": f"{2 * capacity}", "gpu__capacity": "0"}
        with daemon_and_client(Path(folder), thread_count(), **settings) as (_, client):
            exact, _ = _written(client, shape, count, allow_loss=False)
            lossy, stats = _written(client, shape, count, allow_loss=True)
    yield make_row(
        "codec",
        "compressed in the tiers: bytes on nvme",
        lossy,
        "B",
        reference=exact,
        reference_name="the same blocks where loss is forbidden",
        goal="<= 0.52",
    )
    ratio = stats["compressed_in_bytes"] / stats["compressed_out_bytes"]
    yield make_row("codec", "compressed in the tiers: exact bytes over FP8 bytes in host", ratio, "", goal=">= 1.9")
    yield make_row("codec", "compressed in the tiers: mean relative L2 error", stats["compress_relative_l2_mean"], "")


def _written(client: Client, shape: Geometry, count: int, *, allow_loss: bool) -> tuple[float, dict[str, float]]:
    """Bytes that the store of these blocks wrote to nvme, and the daemon's statistics after they were read again."""
    space = client.register(Namespace(model=f"codec-{allow_loss}", geometry=shape), allow_loss=allow_loss)
    keys = block_keys(space.digest, np.arange(count * shape.block_size), shape.block_size)
    blocks, before = _deviates(count, shape), client.stats()["nvme_stored_bytes"]
    stored = client.store(space, keys, blocks)
    client.flush()
    stats = client.stats()
    found = client.fetch(space, keys)
    if stored.stored != count or found.count != count:
        raise BenchError(f"{stored.stored} of {count} blocks were stored and {found.count} found")
    named = int(np.count_nonzero(found.codecs == Codec.FP8_E4M3))
    if named != (count if allow_loss else 0) or (not allow_loss and not np.array_equal(found.blocks, blocks)):
        raise BenchError(f"{named} of {count} blocks came back as FP8 with allow_loss={allow_loss}")
    return float(stats["nvme_stored_bytes"] - before), stats


def _deviates(count: int, shape: Geometry) -> Bytes:
    """Normal deviates as bf16, packed: [count, block_bytes]."""
    values = np.random.default_rng(7).standard_normal((count, shape.block_bytes // 2), np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
