"""The live page: whole in itself, with numbers for everybody and names for nobody."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtierd.core.clock import ManualClock
from kvtierd.daemon.census import FLAGS, Census
from kvtierd.daemon.families import rows
from kvtierd.daemon.live import FLOWS, TIERS, page, snapshot
from kvtierd.daemon.requests import RequestLog, Tokens
from kvtierd.daemon.tenant_metrics import LABELS, TenantNumbers, collect_tenants
from kvtierd.protocol.messages import TIER_HOST, Get, OkReply, Tier
from kvtierd.protocol.service import Session
from kvtierd.telemetry.prometheus import render
from kvtierd.tiers.blocks import VISIBLE
from kvtierd.tiers.sessions import SessionState

ROOT = Path(__file__).resolve().parents[3]


class Shown:
    def __init__(self, stats: dict[str, Any]) -> None:
        self.stats = stats
        self.clock = ManualClock()
        self.requests = RequestLog(self.clock, slow_ms=1)
        begin_ns = self.clock.now_ns()
        self.clock.advance(0.5)
        session = Session(1, "secret-tenant", "secret-client", b"t" * 16, state=SessionState())
        self.requests(session, Get(id=1, namespace=1), [memoryview(bytes(64))], begin_ns, OkReply(id=1))

    def state(self) -> dict[str, Any]:
        return self.stats

    def status(self) -> str:
        return "serving on ipc:///run/kvtierd/secret-tenant/kvtierd.sock; 3 clients"

    def namespaces(self, _census: Census) -> list[dict[str, Any]]:
        return [
            {"digest": f"{n:064x}", "model": "secret-model", "tenant": "secret-tenant", "blocks": n, "bytes": n * 10}
            for n in range(20)
        ]

    shows_tenants = False

    def tenant_numbers(self, _census: Census) -> list[TenantNumbers]:
        sizes: dict[Tier, int] = {"gpu": 0, "host": 30, "nvme": 70}
        tokens = Tokens(asked=100)
        tokens.by_mask[TIER_HOST] = 60
        return [
            TenantNumbers(
                "secret-tenant", {"gpu": 0, "host": 3, "nvme": 7}, sizes, {"gpu": 0, "host": 64, "nvme": 0}, 2, tokens,
                {"read": 4, "write": 1, "sequence": 0}, 20, {"nvme_bytes": 2, "tenant_share": 3},
            )
        ]  # fmt: skip


@pytest.fixture
def census() -> Census:
    by_flags = np.zeros(FLAGS, np.int64)
    by_flags[TIER_HOST | VISIBLE] = 7
    return Census(by_flags, np.zeros(20, np.int64), {tier: np.zeros(20, np.int64) for tier in TIERS})


def test_tenants_are_named_where_the_operator_says_so(census: Census) -> None:
    shown = Shown({})
    assert snapshot(shown, census)["tenants"] == []
    shown.shows_tenants = True
    (tenant,) = snapshot(shown, census)["tenants"]
    assert tenant["name"] == "secret-tenant"
    assert (tenant["asked_tokens"], tenant["hit_tokens"], tenant["refused"]) == (100, 60, 5)
    row = page().decode().partition("now.tenants.map")[2].partition(");")[0]
    asked = set(re.findall(r"\bt\.([a-z_0-9]+)\b", row))
    assert asked == set(tenant), "the page shows what is there"


def test_metrics_by_tenant_have_a_label_for_each_and_no_quota_that_is_none(census: Census) -> None:
    text = render(collect_tenants(Shown({}).tenant_numbers(census)))
    lines = set(text.splitlines())
    assert lines >= {
        'kvtierd_tenant_blocks{tenant="secret-tenant",tier="nvme"} 7',
        'kvtierd_tenant_used_bytes{tenant="secret-tenant",tier="host"} 30',
        'kvtierd_tenant_quota_bytes{tenant="secret-tenant",tier="host"} 64',
        'kvtierd_tenant_lookup_tokens_total{tenant="secret-tenant"} 100',
        'kvtierd_tenant_hit_tokens_total{tenant="secret-tenant",tier="host"} 60',
        'kvtierd_tenant_leases{tenant="secret-tenant",kind="read"} 4',
        'kvtierd_tenant_held_bytes{tenant="secret-tenant"} 20',
        'kvtierd_tenant_sessions{tenant="secret-tenant"} 2',
        'kvtierd_tenant_quota_refusals_total{tenant="secret-tenant",quota="tenant_share"} 3',
    }
    assert "kvtierd_tenant_quota_bytes" in text
    assert 'quota_bytes{tenant="secret-tenant",tier="nvme"}' not in text
    assert all(family.full_name in (ROOT / "docs" / "METRICS.md").read_text() for family in LABELS)


def test_page_loads_nothing_from_anywhere_else() -> None:
    text = page().decode()
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"<(link|img|iframe)|\bsrc=|@import|innerHTML|url\(", text)


def test_every_statistic_of_the_page_is_counted_somewhere() -> None:
    assert set(FLOWS.values()) <= set(rows())
    for tier in TIERS:
        assert {f"{tier}_capacity_bytes", f"{tier}_used_bytes", f"{tier}_blocks", f"hit_{tier}_tokens"} <= set(rows())


def test_page_asks_for_nothing_that_is_not_there(census: Census) -> None:
    found = snapshot(Shown({}), census)
    asked = set(re.findall(r"\b(?:now|s|p|before)\.([a-z_0-9]+)\b", page().decode()))
    assert asked - set(found) - {"time", "what", "ms", "blocks", "outcome", "map"} == set()


def test_numbers_name_no_model_client_or_tenant(census: Census) -> None:
    found = snapshot(Shown({"lookup_tokens": 5}), census)
    text = json.dumps(found)
    assert "secret" not in text
    assert (found["asked_tokens"], found["dirty_blocks"], found["status"]) == (5, 7, "serving")
    assert [entry["blocks"] for entry in found["namespaces"]] == [19, 18, 17, 16, 15, 14, 13, 12]
    assert found["slow"][0]["ms"] == 500
    assert found["requests"]["get"] == {"count": 1, "p50_s": 0.5, "p99_s": 0.5}


def test_duration_beyond_the_last_bound_is_json_too(census: Census) -> None:
    shown = Shown({})
    begin_ns = shown.clock.now_ns()
    shown.clock.advance(60)
    session = Session(1, "t", "c", b"t" * 16, state=SessionState())
    shown.requests(session, Get(id=1, namespace=1), (), begin_ns, "deadline")
    assert snapshot(shown, census)["requests"]["get"]["p99_s"] is None
