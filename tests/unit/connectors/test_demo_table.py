"""The demonstration's lines: what was really served is what is shown."""

from __future__ import annotations

from kvtierd.connectors.demo_table import Line, as_table, bench_row

COLD = Line(tier="", restarted=False, first_token_s=10.0, cold_s=10.0)
HOST = Line(
    tier="host",
    restarted=False,
    first_token_s=0.5,
    cold_s=10.0,
    tokens_found=3968,
    payload_bytes=182_845_440,
    sources={"host": 31},
)
MIXED = Line(
    tier="nvme", restarted=True, first_token_s=1.0, cold_s=10.0, tokens_found=3968, sources={"nvme": 30, "host": 1}
)


def test_the_table_is_aligned() -> None:
    head, cold, host = as_table([COLD, HOST]).splitlines()
    assert head.startswith("served from")
    assert cold.split() == ["cold", "prefill", "10.00", "s", "1", "0", "-"]
    assert host.split() == ["host", "0.50", "s", "0.050", "3,968", "174", "MiB", "yes"]
    assert head.index("of cold") + len("of cold") == host.index("0.050") + len("0.050")


def test_a_tier_that_did_not_serve_is_said_so() -> None:
    assert "nvme after a restart (NOT SERVED: 1 blocks from host, 30 blocks from nvme)" in as_table([MIXED])
    nothing = Line(tier="gpu", restarted=False, first_token_s=9.0, cold_s=10.0)
    assert "gpu (NOT SERVED: nothing found)" in as_table([nothing])
    assert not nothing.ok


def test_a_row_has_its_goal_and_a_wrong_answer_fails_it() -> None:
    row = bench_row(HOST)
    assert (row.bench, row.metric, row.unit) == ("demo", "time to first token from host", "ms")
    assert (row.value, row.reference, row.ratio, row.goal, row.ok) == (500.0, 10_000.0, 0.05, "<= 0.15", True)
    assert not bench_row(MIXED).ok
    wrong = Line(tier="host", restarted=False, first_token_s=0.5, cold_s=10.0, sources={"host": 31}, equal=False)
    assert not bench_row(wrong).ok
    slow = Line(tier="host", restarted=False, first_token_s=2.0, cold_s=10.0, sources={"host": 31})
    assert slow.ok
    assert not bench_row(slow).ok


def test_a_figure_without_a_goal_is_only_shown() -> None:
    row = bench_row(Line(tier="gpu", restarted=False, first_token_s=9.0, cold_s=10.0, sources={"gpu": 31}))
    assert (row.goal, row.ok) == ("", True)
