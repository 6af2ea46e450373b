"""What the benches read about the machine and about processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtierd.bench.options import available_bytes, l3_bytes, need_memory, thread_count
from kvtierd.bench.rows import BenchError
from kvtierd.bench.smaps import maps_file, pss_of, resident_bytes

SMAPS = """\
7f0000000000-7f0010000000 rw-p 00000000 00:00 0
Size:             262144 kB
Rss:               2048 kB
Pss:               2000 kB
VmFlags: rd wr mr mw me ac dd hg
7f0020000000-7f0024000000 rw-s 00000000 00:01 77                         /memfd:kvtierd-chunk-1 (deleted)
Size:              65536 kB
Rss:               4096 kB
Pss:               4000 kB
VmFlags: rd wr sh mr mw me ms dd
7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0                          [vdso]
Size:                  8 kB
Rss:                   4 kB
Pss:                   1 kB
VmFlags: rd ex mr mw me de dd
55d000000000-55d000010000 r-xp 00000000 08:01 12                         /usr/bin/python3.11
Size:                 64 kB
Rss:                  64 kB
Pss:                  30 kB
VmFlags: rd ex mr mw me
"""


def test_the_third_level_cache_is_the_one_read(tmp_path: Path) -> None:
    for index, (level, size) in enumerate([("1", "32K"), ("2", "1024K"), ("3", "24576K")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "level").write_text(level + "\n")
        (folder / "size").write_text(size + "\n")
    assert l3_bytes(tmp_path) == 24 << 20


def test_a_kernel_that_names_no_third_level_gets_a_default(tmp_path: Path) -> None:
    assert l3_bytes(tmp_path) == 32 << 20


def test_available_memory_is_read_and_too_little_is_said(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:   7 kB\n")
    assert available_bytes(meminfo) == 7168
    meminfo.write_text("MemTotal:  100 kB\n")
    with pytest.raises(BenchError, match="no MemAvailable"):
        available_bytes(meminfo)
    need_memory(1)
    with pytest.raises(BenchError, match="are needed and"):
        need_memory(1 << 60)


def test_threads_are_what_this_process_may_use() -> None:
    assert thread_count() == min(8, len(os.sched_getaffinity(0)))


def test_pools_are_the_large_mappings_that_are_not_dumped() -> None:
    assert pss_of(SMAPS) == ((2000 + 4000 + 1 + 30) << 10, 6000 << 10)


def test_this_process_is_resident_and_maps_its_libraries() -> None:
    total, pools = resident_bytes(os.getpid())
    assert total > pools
    assert maps_file(os.getpid(), "libc")
    assert not maps_file(os.getpid(), "libtorch")
