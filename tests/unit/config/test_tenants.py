"""The section whose keys are names."""

from __future__ import annotations

import pytest

from kvtierd.config.render import render
from kvtierd.config.schema import Settings, Tenant

KEY, OTHER = "a" * 40, "b" * 40


def test_tenants_are_read_from_every_source(load_text) -> None:
    text = f"tenants:\n  team-a: {{host_bytes: 64MiB, keys: ['{KEY}', '{OTHER}']}}\n  idle:\n"
    loaded = load_text(text, {"KVTIERD__TENANTS__B__NVME_BYTES": "1GiB"}, [("tenants.c.group", "staff", "--set")])
    assert loaded.settings.tenants == {
        "team-a": Tenant(host_bytes=64 << 20, keys=f"{KEY} {OTHER}"),
        "idle": Tenant(),
        "b": Tenant(nvme_bytes=1 << 30),
        "c": Tenant(group="staff"),
    }
    assert loaded.origins["tenants.c.group"] == "--set"
    assert loaded.origins["tenants.idle.mode"] == "default"


def test_printed_tenants_load_to_the_same(load_text) -> None:
    loaded = load_text(f"tenants: {{a: {{keys: ['{KEY}'], mode: '0755'}}, b: {{}}}}")
    assert load_text(render(loaded)).settings == loaded.settings
    assert Settings().tenants == {}


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("tenants: {Team A: {}}", "tenants.Team A", "no name for a tenant"),
        ("tenants: {a: {hostbytes: 1GiB}}", "tenants.a.hostbytes", "nearest is tenants.a.host_bytes"),
        ("tenants: {a: 3}", "tenants.a", "is a section"),
        ("tenants: {a: {mode: '0777'}}", "tenants.a.mode", "not one of 0700, 0750, 0755"),
        ("tenants: {a: {keys: [short]}}", "tenants.a.keys", "no CURVE public key"),
        ("tenants: {a: {host_bytes: 1MiB}}", "tenants.a.host_bytes", "less than one chunk"),
        ("tenants: {admin: {}}", "tenants.admin", "operators' socket"),
        (f"tenants: {{a: {{keys: ['{KEY}']}}, b: {{keys: ['{KEY}']}}}}", "tenants.b.keys", "is a key of a too"),
        ("server: {tcp: '10.0.0.1:5570'}\ntenants: {a: {}}", "server.tcp", "no tenant has keys"),
        ("server: {tcp: '10.0.0.1:99999'}", "server.tcp", "no port"),
        ("server: {tcp: host}", "server.tcp", "like 10.0.0.5:5570"),
        (f"server: {{runtime_dir: /{'r' * 70}}}\ntenants: {{{'t' * 30}: {{}}}}", f"tenants.{'t' * 30}", "allows 107"),
    ],
)
def test_mistake_is_named_with_what_to_do(mistakes, text: str, key: str, says: str) -> None:
    found = mistakes(text)
    assert [problem.key for problem in found if says in problem.text] == [key], found


def test_there_is_a_limit_to_their_number(mistakes) -> None:
    names = ", ".join(f"t{number}: {{}}" for number in range(64))
    assert any("more than 64 tenants" in problem.text for problem in mistakes(f"tenants: {{{names}}}"))
