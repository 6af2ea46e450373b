"""The index bench, run small: rows come out whole, and what does not depend on the machine holds."""

from __future__ import annotations

from kvtierd.bench import index
from kvtierd.bench.index import Sizes, rows_of, slot_ram_bytes
from kvtierd.core.units import GIB

TINY = Sizes(
    keys=20_000,
    rounds=1,
    grow_from=1000,
    grow_to=20_000,
    replays=2,
    host_bytes=GIB,
    others=5000,
    front_rounds=2,
    tokens=(640, 64_000),
)
TIMED = ("M keys/s", "ms")


def test_every_figure_of_the_page_table_comes_with_its_goal() -> None:
    rows = list(rows_of(TINY))
    assert {row.bench for row in rows} == {"index"}
    goals = [(row.goal, row.ratio is not None) for row in rows if row.goal]
    for goal in [(">= 0.22", True), (">= 8", True), ("<= 2", False), (">= 0.95", False), ("<= 160", False)]:
        assert goal in goals
    sure = [row for row in rows if row.goal and row.unit not in TIMED and "RAM" not in row.metric]
    assert [row.metric for row in sure if not row.ok and "share" not in row.metric] == []


def test_everything_that_a_slot_takes_is_counted() -> None:
    """Its row, holds, generation here and in the shared table, and the policy's record; 30 sums of layers apart."""
    slot = slot_ram_bytes(GIB)
    assert slot.columns >= 4 + 4 + 8 + 8 + 32
    assert slot.sums >= 30 * 8


def test_the_smallest_default_block_is_as_described() -> None:
    assert index.SMALLEST.block_bytes == 64 * 23_040
