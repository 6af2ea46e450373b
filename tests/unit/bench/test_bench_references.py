"""The reference-only parts of the benches, run small: rows come out valid. Nothing here looks at a time."""

from __future__ import annotations

import json

from kvtierd.bench import host, protocol, start
from kvtierd.bench.copies import Threads
from kvtierd.bench.options import l3_bytes
from kvtierd.bench.rounds import alternate, timed
from kvtierd.bench.rows import as_json, make_row
from kvtierd.bench.workload import BATCH, BLOCK_BYTES, LARGE, random_keys
from kvtierd.core.keys import KEY_BYTES
from kvtierd.protocol.codec import decode_request


def test_the_working_set_is_over_four_times_the_cache_in_whole_batches() -> None:
    count = host.working_set_blocks()
    assert count * BLOCK_BYTES > 4 * l3_bytes()
    assert count % BATCH == 0


def test_large_blocks_are_two_mebibytes() -> None:
    assert LARGE.block_bytes == LARGE.slot_bytes == 2 << 20


def test_plain_copies_give_a_row_both_ways() -> None:
    threads = Threads(2)
    try:
        plain = host.PlainCopies(BATCH, threads)
        read, write = alternate([plain.read_rate, plain.write_rate], 1, warmup=0)
    finally:
        threads.close()
    for figure in (read, write):
        row = make_row("host", "plain", figure, "B/s", reference=figure, reference_name="itself", goal=">= 1")
        assert json.loads(as_json(row))["ratio"] == 1
        assert row.ok


def test_the_echos_frames_are_as_long_as_a_real_lookups() -> None:
    request, reply_bytes = protocol.frames_of_a_lookup()
    assert type(decode_request(request[0])).__name__ == "Lookup"
    assert len(request[1]) == BATCH * KEY_BYTES
    assert BATCH < reply_bytes < 200


def test_the_libraries_of_the_start_reference_can_be_imported() -> None:
    assert timed(start.import_libraries) > 0


def test_keys_are_distinct_and_repeatable() -> None:
    keys = random_keys(100, seed=1)
    assert keys.shape == (100, KEY_BYTES)
    assert len({key.tobytes() for key in keys}) == 100
    assert (keys == random_keys(100, seed=1)).all()
    assert (keys != random_keys(100, seed=2)).any()
