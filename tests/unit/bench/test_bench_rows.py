"""Rows and goals."""

from __future__ import annotations

import json
import math

import pytest

from kvtierd.bench.rows import Row, as_json, as_table, make_row, meets


@pytest.mark.parametrize(
    ("goal", "figure", "holds"),
    [
        (">= 0.5", 0.5, True),
        (">= 0.5", 0.4999, False),
        ("<= 2.5", 2.5, True),
        ("<= 2.5", 2.51, False),
        ("> 1", 1.0, False),
        ("<2", 1.9, True),
        ("  >=0.85 ", 0.9, True),
        ("<= 0", 0, True),
        (">= 0.5", math.nan, False),
        ("<= 0.5", math.nan, False),
    ],
)
def test_goals_are_read(goal: str, figure: float, holds: bool) -> None:
    assert meets(goal, figure) is holds


@pytest.mark.parametrize("goal", ["", "0.5", ">=", "= 1", ">= x", ">= 0.5 s", "=> 1", ">= -1"])
def test_what_is_no_goal_is_named(goal: str) -> None:
    with pytest.raises(ValueError, match="is not a goal"):
        meets(goal, 1.0)


def test_a_goal_is_about_the_ratio_where_there_is_a_reference() -> None:
    row = make_row("host", "copy", 8.0, "GB/s", reference=10.0, reference_name="plain", goal=">= 0.85")
    assert row.ratio == 0.8
    assert not row.ok


def test_a_goal_is_about_the_value_where_there_is_none() -> None:
    row = make_row("start", "ready", 1.5, "s", goal="<= 2")
    assert row.ratio is None
    assert row.reference is None
    assert row.ok


def test_a_row_without_a_goal_is_ok() -> None:
    assert make_row("start", "pools", 1e9, "MB").ok


@pytest.mark.parametrize("reference", [0.0, -1.0, math.nan])
def test_a_reference_that_cannot_be_one_is_named(reference: float) -> None:
    with pytest.raises(ValueError, match="host copy: the reference is"):
        make_row("host", "copy", 1.0, "GB/s", reference=reference)


def test_a_row_is_one_line_of_json_with_every_field() -> None:
    row = make_row("start", "ready", 1.5, "s", goal="<= 2")
    line = as_json(row)
    assert "\n" not in line
    fields = ["bench", "metric", "value", "unit", "reference", "reference_name", "ratio", "goal", "ok"]
    assert list(json.loads(line)) == fields == list(Row.__struct_fields__)


def test_the_table_is_aligned_and_tells_missed_goals() -> None:
    rows = [
        make_row("host", "copy", 12345.678, "MB/s", reference=20000.0, reference_name="plain", goal=">= 0.85"),
        make_row("start", "ready", 1.5, "s", goal="<= 2"),
        make_row("start", "pools", 0.001234, "MB"),
    ]
    lines = as_table(rows).splitlines()
    assert [line.split()[0] for line in lines] == ["bench", "host", "start", "start"]
    column = lines[0].index("metric")
    assert all(line[column - 1] == " " and line[column] != " " for line in lines)
    assert "12,346 MB/s" in lines[1]
    assert "0.62   >= 0.85  NO" in lines[1]
    assert "<= 2     yes" in lines[2]
    assert "0.00123 MB" in lines[3]
