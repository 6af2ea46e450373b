"""`kvtierctl demo` without its libraries: one line that says what to install."""

from __future__ import annotations

import importlib.util

import pytest

from kvtierd.cli.main import main


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name in {"torch", "transformers"} else found(name, *rest),
    )
    assert main(["demo"]) == 69
    error = capsys.readouterr().err
    assert "the demo wants torch and transformers: pip install" in error
    assert "kvtierd[demo]" in error


def test_the_demo_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["demo", "--help"])
    assert "--json" in capsys.readouterr().out
