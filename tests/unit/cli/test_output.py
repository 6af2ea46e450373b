from __future__ import annotations

import argparse

import pytest

from kvtierd.cli import output
from kvtierd.cli.operators import socket_of
from kvtierd.cli.top import rates, tiers
from kvtierd.cli.watch import line


def test_columns_put_numbers_to_the_right() -> None:
    text = output.columns(("name", "n", "last"), [("a", 5, "x"), ("bcdef", 1234, "")])
    assert text.splitlines() == ["name      n  last", "a         5  x", "bcdef  1234"]


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "text\n"), (["--format", "json"], '{"a": 1}\n'), (["-q"], ""), (["-q", "--format", "json"], "")],
)
def test_every_command_says_it_as_asked(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    output.add_arguments(parser)
    output.say(parser.parse_args(words), "text", {"a": 1})
    assert capsys.readouterr().out == said


def test_operators_socket_lies_beside_the_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTIERD_ENDPOINT", raising=False)
    assert str(socket_of(None)) == "/run/kvtierd/admin/kvtierd.sock"
    assert str(socket_of("ipc:///tmp/x/team-a/kvtierd.sock")) == "/tmp/x/admin/kvtierd.sock"
    monkeypatch.setenv("KVTIERD_ADMIN_SOCKET", "/tmp/other")
    assert str(socket_of(None)) == "/tmp/other"
    assert str(socket_of("ipc:///tmp/x/team-a/kvtierd.sock")) == "/tmp/x/admin/kvtierd.sock"


def test_top_shows_what_happened_in_a_second() -> None:
    before = {"server_requests_total": 100, "lookup_tokens": 0, "hit_host_tokens": 0, "nvme_read_bytes": 0}
    now = {"server_requests_total": 300, "lookup_tokens": 1000, "hit_host_tokens": 250, "nvme_read_bytes": 4096}
    found = rates(before, now, 2.0)
    assert found == {
        "requests": 100, "tokens asked for": 500, "tokens found in host": 125, "bytes read from nvme": 2048,
        "hit ratio": 0.25,
    }  # fmt: skip
    assert rates(now, now, 1.0)["hit ratio"] == 0.0


def test_top_shows_a_bar_for_each_tier_and_none_for_one_that_is_off() -> None:
    stats = {"host_capacity_bytes": 100, "host_used_bytes": 50, "host_blocks": 3, "gpu_blocks": 0, "nvme_blocks": 9}
    rows = tiers(stats).splitlines()
    assert rows[2].split() == ["host", "#" * 15, "50%", "50", "B", "100", "B", "3"]
    assert rows[3].split() == ["nvme", "0%", "0", "B", "0", "B", "9"]


def test_watched_entry_is_one_line() -> None:
    entry = {"time": "T", "what": "get", "client": "e", "namespace": "", "ms": 0.4}
    assert line(entry) == "T get      client=e ms=0.4"
