from __future__ import annotations

import math

import pytest

from kvtierd.telemetry.prometheus import Family, Histogram, render

SECONDS = Family("request_seconds", "histogram", "seconds", "how long")


def test_histogram_is_cumulative_and_ends_in_infinity() -> None:
    histogram = Histogram((0.001, 0.01))
    for duration_ns in (1, 1_000_000, 1_000_001, 5_000_000, 11_000_000):
        histogram.add(duration_ns)
    assert render([(SECONDS, [({"operation": "get"}, histogram)])]).splitlines() == [
        "# HELP kvtierd_request_seconds how long",
        "# TYPE kvtierd_request_seconds histogram",
        'kvtierd_request_seconds_bucket{operation="get",le="0.001"} 2',
        'kvtierd_request_seconds_bucket{operation="get",le="0.01"} 4',
        'kvtierd_request_seconds_bucket{operation="get",le="+Inf"} 5',
        'kvtierd_request_seconds_sum{operation="get"} 0.018000002',
        'kvtierd_request_seconds_count{operation="get"} 5',
    ]


def test_quantile_is_the_bound_below_which_it_lies() -> None:
    histogram = Histogram((0.001, 0.01))
    for duration_ns in [500_000] * 90 + [5_000_000] * 9 + [50_000_000]:
        histogram.add(duration_ns)
    assert (histogram.quantile(0.5), histogram.quantile(0.99), histogram.quantile(1)) == (0.001, 0.01, math.inf)


def test_label_values_and_help_are_escaped() -> None:
    family = Family("info", "gauge", "", 'a "word"\nand \\ more')
    text = render([(family, [({"value": 'x"\n\\'}, 1)])])
    assert text.splitlines() == [
        '# HELP kvtierd_info a "word" and \\\\ more',
        "# TYPE kvtierd_info gauge",
        'kvtierd_info{value="x\\"\\n\\\\"} 1',
    ]


@pytest.mark.parametrize(
    ("name", "kind", "unit"),
    [("Blocks", "gauge", ""), ("blocks", "counter", ""), ("blocks_total", "gauge", ""), ("used", "gauge", "bytes")],
)
def test_name_against_the_rules_is_refused(name: str, kind: str, unit: str) -> None:
    with pytest.raises(ValueError, match=repr(name)):
        Family(name, kind, unit, "x")  # type: ignore[arg-type]
