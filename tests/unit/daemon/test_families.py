"""Metrics as Prometheus sees them: names by its rules, none forgotten, each documented."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from kvtierd.daemon.families import ABSENCE_SECONDS, BLOCK_STATES, REQUEST_SECONDS, collect, document, rows, sources
from kvtierd.daemon.tenant_metrics import LABELS
from kvtierd.telemetry.prometheus import render

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = re.compile(r'([a-z0-9_]+)(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? \S+')


def _known() -> set[str]:
    names = {entry.family.full_name for entry in sources()} | {BLOCK_STATES.full_name}
    names |= {family.full_name for family in LABELS}
    return names | {
        f"{family.full_name}{tail}"
        for family in (REQUEST_SECONDS, ABSENCE_SECONDS)
        for tail in ("_bucket", "_sum", "_count")
    }


def test_every_statistic_is_in_exactly_one_family() -> None:
    named = [name for entry in sources() for name in entry.labels]
    unknown = [name for name in named if name not in rows()]
    assert not unknown, f"kvtierd.daemon.families names statistics that are nowhere counted: {unknown}"
    assert set(named) == set(rows())
    twice = {name for name in named if named.count(name) > 1}
    assert twice == {"nvme_stored_bytes"}  # a transfer, and one cause of writes


def test_names_are_unique_and_say_their_unit() -> None:
    names = [entry.family.full_name for entry in sources()]
    assert len(set(names)) == len(names)
    for entry in sources():
        last = entry.family.name.removesuffix("_total").split("_")[-1]
        assert last not in {"ns", "ms", "s", "us", "kib", "mib", "percent", "share"}, entry.family.name
        assert entry.family.meaning


def test_families_sum_only_alike_things() -> None:
    for entry in sources():
        kinds = {rows()[name].kind for name in entry.labels}
        assert len(kinds) == 1, entry.family.name
        assert (kinds == {"counter"}) == (entry.family.kind == "counter"), entry.family.name


def test_text_of_a_scrape_is_well_formed() -> None:
    stats = {name: "x" if row.kind == "text" else 7 for name, row in rows().items()}
    lines = render(collect(stats)).splitlines()
    assert len([line for line in lines if line.startswith("# TYPE")]) == len(sources())
    samples = [line for line in lines if not line.startswith("#")]
    assert [line for line in samples if not SAMPLE.fullmatch(line)] == []
    assert len(set(samples)) == len(samples)
    assert 'kvtierd_tier_blocks{tier="nvme"} 7' in samples
    assert 'kvtierd_nvme_mode{value="x"} 1' in samples
    seconds = next(line for line in samples if line.startswith('kvtierd_transfer_seconds_total{source="nvme"'))
    assert float(seconds.split()[-1]) == pytest.approx(7e-9)


def test_statistics_that_are_not_there_make_no_samples() -> None:
    assert render(collect({})) == "\n"
    assert render(collect({"leases": "unknown", "memory_error": ""})) == "\n"
    assert render(collect({"leases": 3})).splitlines()[2:] == ['kvtierd_leases{kind="read"} 3']


def test_document_has_a_row_for_every_metric() -> None:
    text = (ROOT / "docs" / "METRICS.md").read_text()
    assert text == document(), "run: make docs"


def test_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((ROOT / "systemd" / "grafana.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 8
    asked = {
        name
        for panel in panels
        for target in panel.get("targets", ())
        for name in re.findall(r"kvtierd_[a-z0-9_]+", target["expr"])
    }
    assert asked
    assert asked - _known() == set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["title"]
        assert panel["type"] == "row" or panel["targets"]
        assert panel.get("datasource", {"uid": "${datasource}"})["uid"] == "${datasource}"


def test_alert_rules_ask_for_metrics_that_exist_and_say_what_to_do() -> None:
    rules = yaml.safe_load((ROOT / "systemd" / "alerts.yaml").read_text())
    found = [rule for group in rules["groups"] for rule in group["rules"]]
    assert len(found) >= 6
    for rule in found:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert set(rule["annotations"]) == {"summary", "description"}
        assert set(re.findall(r"kvtierd_[a-z0-9_]+", rule["expr"])) - _known() == set(), rule["alert"]


@pytest.mark.parametrize("name", ["grafana.json", "alerts.yaml"])
def test_files_for_other_tools_are_part_of_the_package(name: str) -> None:
    assert (ROOT / "kvtierd" / "systemd" / name).is_file()


def test_reasons_of_evictions_add_up_to_all_of_them() -> None:
    text = render(collect({"host_evicted_blocks": 10, "host_watermark_blocks": 4}))
    assert [line for line in text.splitlines() if line.startswith("kvtierd_evicted")] == [
        'kvtierd_evicted_blocks_total{tier="host",reason="room"} 6',
        'kvtierd_evicted_blocks_total{tier="host",reason="watermark"} 4',
    ]
