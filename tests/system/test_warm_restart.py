"""The host tier over restarts under a real systemd: its file descriptor store keeps it, and a full stop drops it."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

ADOPTED = "kvtierd_warm_adopted_blocks_total"
ONBOARDED = "kvtierd_onboarded_blocks_total"


def test_case_15_restart_keeps_the_host_tier_and_reads_nothing_from_disk(service) -> None:
    assert service.client("store", "warm") == 32
    before = service.pid()
    service.systemctl("restart")
    assert service.pid() != before
    assert service.number(ADOPTED) >= 32
    assert service.client("fetch", "warm") == 32
    assert service.number(ONBOARDED) == 0


def test_kill_9_keeps_what_was_committed(service) -> None:
    assert service.client("store", "killed") == 32
    before = service.pid()
    service.kill("SIGKILL")
    service.until("another process serves", lambda: service.runs_again(before))
    assert service.number(ADOPTED) >= 32
    assert service.client("fetch", "killed") == 32
    assert service.number(ONBOARDED) == 0


def test_slots_of_a_client_that_lives_stay_out_of_use_until_it_ends(service) -> None:
    with service.holder("held") as client:
        for _ in range(2):
            service.systemctl("restart")
            assert service.number("kvtierd_warm_quarantined_slots") == 32
        client.communicate("")
    service.until("its slots are free", lambda: service.number("kvtierd_warm_quarantined_slots") == 0)


def test_full_stop_drops_the_memory(service) -> None:
    assert service.client("store", "dropped", "--flush") == 32
    service.systemctl("stop")
    assert service.show("NFileDescriptorStore") == {"NFileDescriptorStore": "0"}
    service.systemctl("start")
    assert service.number(ADOPTED) == 0
    assert service.client("fetch", "dropped") == 32
    assert service.number(ONBOARDED) == 32


def test_another_capacity_begins_empty_and_the_journal_says_why(service) -> None:
    assert service.client("store", "resized", "--flush") == 32
    service.machine.write("/etc/kvtierd/conf.d/zz-resized.yaml", "host: {capacity: 48MiB}\n")
    try:
        service.systemctl("restart")
        assert service.number(ADOPTED) == 0
        assert "the host tier has 3 of 16.0 MiB now" in service.journal_text()
        assert service.client("fetch", "resized") == 32
        # Nothing of the old memory is kept beside the new.
        kept = int(service.show("NFileDescriptorStore")["NFileDescriptorStore"])
        assert kept <= 3 + 3
    finally:
        service.machine.remove("/etc/kvtierd/conf.d/zz-resized.yaml")
        service.systemctl("restart")
