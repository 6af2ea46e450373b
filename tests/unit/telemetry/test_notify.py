from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvtierd.telemetry.notify import notify


@pytest.mark.parametrize("abstract", [False, True])
def test_state_reaches_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool) -> None:
    name = f"kvtierd-test-{tmp_path.name}" if abstract else str(tmp_path / "n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}" if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}" if abstract else name)
        assert notify("READY=1")
        assert listener.recv(64) == b"READY=1"


def test_without_a_listener_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert not notify("READY=1")
