"""Tenants of the service: who gets in is for the kernel to say, by the folder's mode and group."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

CLIENT = """
import sys
import numpy as np
from kvtierd import Client, Geometry, Namespace, Unavailable, block_keys
shape = Geometry(block_size=16, layers=2, kv_heads=2, k_dim=64, v_dim=64)
with Client(sys.argv[1], timeout_s=5, transfer_timeout_s=10) as client:
    try:
        client.ping()
    except Unavailable as error:
        print(error)
        raise SystemExit(0)
    model = client.register(Namespace(model="m", geometry=shape))
    keys = block_keys(model.digest, range(64), 16)
    before = client.lookup(model, keys).count
    client.store(model, keys, np.zeros((4, shape.block_bytes), np.uint8))
    print("found", before, "attached", client.fetch(model, keys).count)
"""
TENANTS = """\
tenants:
  team-a: {group: team-a, host_bytes: 32MiB}
"""


@pytest.fixture(scope="module")
def team(installed):
    """A tenant with a group of its own; anna is in it, bert is in the default tenant's."""
    installed.write("/etc/sysusers.d/team-a.conf", "g team-a -\nu anna -\nu bert -\nm anna team-a\nm bert kvtierd\n")
    installed.write("/etc/tmpfiles.d/team-a.conf", "d /run/kvtierd/team-a 2750 kvtierd team-a -\n")
    installed.write("/etc/kvtierd/conf.d/team-a.yaml", TENANTS)
    installed.run("systemd-sysusers")
    installed.run("systemd-tmpfiles", "--create", "team-a.conf")
    installed.run("systemctl", "restart", "kvtierd")
    yield installed
    installed.remove("/etc/kvtierd/conf.d/team-a.yaml")
    installed.run("systemctl", "restart", "kvtierd")


def as_user(service, user: str, tenant: str) -> str:
    words = [f"{service.bindir}/python", "-c", CLIENT, f"ipc:///run/kvtierd/{tenant}/kvtierd.sock"]
    return service.machine.run(*words, user=user).stdout.strip()


@pytest.mark.usefixtures("team")
def test_case_09_a_tenants_group_gets_in_and_nobody_else(service) -> None:
    assert as_user(service, "anna", "team-a") == "found 0 attached 4"
    assert as_user(service, "bert", "default") == "found 0 attached 4", "and not anna's, which are equal"
    assert as_user(service, "anna", "team-a") == "found 4 attached 4"
    for user, tenant in (("bert", "team-a"), ("anna", "default")):
        assert "is this user in the tenant's group?" in as_user(service, user, tenant)


@pytest.mark.usefixtures("service")
def test_sockets_belong_to_the_tenants_group(team) -> None:
    found = team.run(
        "stat", "-c", "%a %U %G", *(f"/run/kvtierd/team-a/{name}.sock" for name in ("kvtierd", "arena", "events"))
    )
    assert found.stdout.splitlines() == ["660 kvtierd team-a"] * 3


@pytest.mark.usefixtures("team")
def test_restart_of_the_daemon_keeps_both_warm(service) -> None:
    as_user(service, "anna", "team-a")
    as_user(service, "bert", "default")
    service.systemctl("restart")
    assert as_user(service, "anna", "team-a") == "found 4 attached 4"
    assert as_user(service, "bert", "default") == "found 4 attached 4"


def test_reload_takes_over_a_quota_and_says_so(team, service) -> None:
    team.write("/etc/kvtierd/conf.d/team-a.yaml", TENANTS.replace("32MiB", "16MiB"))
    try:
        service.systemctl("reload")
        service.until(
            "the quota is taken over",
            lambda: "tenants.team-a.host_bytes 32.0 MiB -> 16.0 MiB" in service.journal_text(),
        )
    finally:
        team.write("/etc/kvtierd/conf.d/team-a.yaml", TENANTS)
        service.systemctl("reload")


def test_folder_that_is_open_to_everybody_is_refused(team, service) -> None:
    team.run("chmod", "2755", "/run/kvtierd/team-a")
    try:
        done = service.systemctl("restart", check=False)
        assert done.returncode
        assert "tenant team-a is open to everybody" in service.journal_text()
    finally:
        team.run("chmod", "2750", "/run/kvtierd/team-a")
        service.ensure_running()
