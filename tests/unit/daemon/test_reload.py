"""What a running daemon takes over of a changed configuration."""

from __future__ import annotations

import pytest

from kvtierd.config.fields import FIELDS
from kvtierd.config.loader import build
from kvtierd.config.schema import Host, KvCache, Leases, Log, Settings, Tenant
from kvtierd.core.clock import ManualClock
from kvtierd.daemon.reload import plan
from kvtierd.tiers.manager import TierManager

GIB = 1 << 30

OTHER = {
    "kv_cache_config.gpu_watermark": 0.5,
    "kv_cache_config.prefetch_window": 9,
    "kv_cache_config.ttl_s": 60,
    "host.watermark": 0.6,
    "leases.max_ttl_ms": 700_000,
    "leases.reservation_ttl_ms": 5,
    "leases.max_pinned_share": 0.25,
    "leases.tenant_share": 0.3,
    "log.level": "debug",
    "log.format": "json",
    "metrics.slow_ms": 7,
    "metrics.tenants": False,
}
"""Another value of every setting that may be reloaded."""


def test_nothing_written_changes_nothing() -> None:
    found = plan(Settings(), Settings())
    assert (found.settings, found.changed, found.waiting) == (Settings(), [], [])
    assert str(found) == "nothing changes"


def test_reloadable_settings_change_and_the_others_wait() -> None:
    running = Settings()
    written = Settings(
        host=Host(capacity=2 * GIB, watermark=0.5), log=Log(level="debug"), kv_cache_config=KvCache(block_size=64)
    )
    found = plan(running, written)
    assert found.settings == Settings(host=Host(watermark=0.5), log=Log(level="debug"))
    assert found.changed == ["host.watermark 0.95 -> 0.5", "log.level info -> debug"]
    assert found.waiting == ["kv_cache_config.block_size 128 -> 64", "host.capacity 1.00 GiB -> 2.00 GiB"]
    assert "after a restart: kv_cache_config.block_size" in str(found)


def test_contradiction_between_what_changes_and_what_stays_is_refused() -> None:
    running = Settings(leases=Leases(ttl_ms=10_000, max_ttl_ms=600_000))
    written = Settings(leases=Leases(ttl_ms=1_000, max_ttl_ms=2_000))
    with pytest.raises(ValueError, match=r"leases.ttl_ms: 10000 is over leases.max_ttl_ms, 2000"):
        plan(running, written)


def test_every_setting_that_is_marked_as_reloadable_is_known_here() -> None:
    assert {key for key, field in FIELDS.items() if field.reload} == set(OTHER)
    assert all(OTHER[key] != FIELDS[key].default for key in OTHER)


def test_manager_takes_over_every_reloadable_setting_of_the_tiers() -> None:
    small = {"max_blocks": 1024, "nvme.directory": "", "host.capacity": 4 << 20, "host.chunk_bytes": 1 << 20}
    manager = TierManager(build(small), store=None, device=None, clock=ManualClock())
    manager.apply(build({**small, **OTHER}))
    assert manager._room.marks == {"host": 0.6, "gpu": 0.5}
    assert manager.expiry._default_s == 60
    assert manager._reads.prefetcher.window == 9
    assert manager._reads._limits.max_ttl_ms == 700_000
    assert manager._writes._granting.ttl_ms == 5
    assert manager._admin.pinned_bytes_max == 1 << 20


def test_quotas_and_keys_of_tenants_change_and_tenants_that_come_or_go_wait() -> None:
    running = Settings(tenants={"a": Tenant(), "b": Tenant()})
    written = Settings(tenants={"a": Tenant(host_bytes=GIB, keys="k" * 40, group="staff"), "c": Tenant()})
    found = plan(running, written)
    assert found.settings.tenants == {"a": Tenant(host_bytes=GIB, keys="k" * 40), "b": Tenant()}
    assert len(found.changed) == 2
    assert found.waiting == ["tenants.a.group '' -> staff", "tenants.c is new", "tenants.b goes"]


def test_tenant_that_goes_loses_its_remote_clients_at_once() -> None:
    found = plan(Settings(tenants={"a": Tenant(keys="k" * 40)}), Settings())
    assert found.settings.tenants == {"a": Tenant()}
