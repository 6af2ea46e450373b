"""The plan of how much of a disk is taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.core.units import GIB, KIB, MIB
from kvtierd.storage.space import MIN_SEGMENT_BYTES, plan


def test_default_is_half_of_what_is_free_and_ours_so_that_it_stays_over_restarts() -> None:
    fresh = plan(0, 256 * MIB, free_bytes=40 * GIB, total_bytes=100 * GIB, own_bytes=0)
    later = plan(0, 256 * MIB, free_bytes=25 * GIB, total_bytes=100 * GIB, own_bytes=15 * GIB)
    assert fresh.capacity_bytes == later.capacity_bytes == 20 * GIB
    assert fresh.segment_bytes == later.segment_bytes == 256 * MIB


def test_default_has_a_bound() -> None:
    assert plan(0, 256 * MIB, 10_000 * GIB, 10_000 * GIB, 0).capacity_bytes == 64 * GIB


def test_reserve_is_a_share_of_the_disk_with_a_bound() -> None:
    assert plan(0, 256 * MIB, 4 * GIB, 10 * GIB, 0).reserve_bytes == 10 * GIB // 20
    assert plan(0, 256 * MIB, 4 * GIB, 1000 * GIB, 0).reserve_bytes == GIB


@given(st.integers(1 * MIB, 100 * GIB), st.integers(MIN_SEGMENT_BYTES, 2 * GIB))
def test_case_11_all_segments_with_their_overhead_fit_and_little_is_wasted(capacity: int, segment: int) -> None:
    limits = plan(capacity, segment, 0, 0, 0)
    taken = limits.footprint(limits.segments * limits.segment_bytes, limits.segments)
    assert taken <= capacity
    assert taken > 0.7 * capacity
    assert limits.segments >= 2
    assert limits.segment_bytes <= segment
    assert limits.segment_bytes % 4096 == 0


@pytest.mark.parametrize(
    ("capacity", "segment", "free", "code", "names"),
    [
        (1000, 64 * MIB, GIB, ExitCode.CONFIG, "nvme.capacity is 1000"),
        (GIB, 4096, GIB, ExitCode.CONFIG, "nvme.segment_bytes is 4096"),
        (0, 64 * MIB, 10 * KIB, ExitCode.IO, "full"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    capacity: int, segment: int, free: int, code: ExitCode, names: str
) -> None:
    with pytest.raises(StartupError, match=names) as caught:
        plan(capacity, segment, free, GIB, 0)
    assert caught.value.exit_code == code


def test_default_that_is_a_little_lower_than_before_removes_nothing() -> None:
    fresh = plan(0, 256 * MIB, free_bytes=64 * MIB, total_bytes=64 * MIB, own_bytes=0)
    own = fresh.footprint(fresh.segments * fresh.segment_bytes, fresh.segments)
    for grown in (0, 4 * KIB, MIB, 4 * MIB):  # what others wrote onto the file system meanwhile
        later = plan(0, 256 * MIB, 64 * MIB - own - grown, 64 * MIB, own)
        assert later.capacity_bytes >= own
        assert later.segments == fresh.segments
    filled = plan(0, 256 * MIB, 64 * MIB - own - 16 * MIB, 64 * MIB, own)
    assert filled.capacity_bytes == 24 * MIB
