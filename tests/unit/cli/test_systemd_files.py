"""The service's files: whole, in their places, and in step with what they describe."""

from __future__ import annotations

import importlib.resources
import shutil
import subprocess
from pathlib import Path

import pytest

from kvtierd.cli import main as cli
from kvtierd.config.fields import FIELDS
from kvtierd.config.loader import load
from kvtierd.config.reference import reference
from kvtierd.config.schema import Settings
from kvtierd.core.errors import ExitCode

UNIT = importlib.resources.files("kvtierd.systemd") / "kvtierd.service"
INSTALLED = {
    "usr/local/lib/systemd/system/kvtierd.service",
    "usr/local/lib/sysusers.d/kvtierd.conf",
    "usr/local/lib/tmpfiles.d/kvtierd.conf",
    "usr/local/share/bash-completion/completions/kvtierctl",
    "usr/local/share/man/man1/kvtierctl.1",
    "usr/local/share/man/man5/kvtierd.yaml.5",
    "usr/local/share/man/man8/kvtierd.8",
    "etc/kvtierd/kvtierd.yaml",
}


def _settings(unit: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in unit.splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def _files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_reference_configuration_is_that_of_the_schema() -> None:
    text = (importlib.resources.files("kvtierd.systemd") / "kvtierd.yaml").read_text()
    assert text == reference(), "run: make docs"


def test_reference_configuration_says_what_is_so_without_it(tmp_path: Path) -> None:
    file = tmp_path / "kvtierd.yaml"
    file.write_text(reference())
    assert load(config=file, environment={}).settings == Settings()
    shown = [line[: line.index("#")] + line.lstrip(" #") for line in reference().splitlines() if _is_value(line)]
    assert len(shown) == len(FIELDS)
    file.write_text("\n".join(line for line in _with_sections(reference())))
    loaded = load(config=file, environment={})
    assert loaded.settings == Settings()
    assert {origin.split(":")[0] for origin in loaded.origins.values()} == {str(file)}


def _is_value(line: str) -> bool:
    return line.lstrip().startswith("#") and not line.lstrip().startswith("# ")


def _with_sections(text: str) -> list[str]:
    """The reference with all marks taken away."""
    return [line.replace("#", "", 1) if _is_value(line) else line for line in text.splitlines()]


def test_unit_restarts_after_failures_but_not_after_mistakes_of_people() -> None:
    unit = _settings(UNIT.read_text())
    assert unit["Type"] == ["notify"]
    assert unit["Restart"] == ["on-failure"]
    assert unit["RestartPreventExitStatus"] == [f"{ExitCode.USAGE:d} {ExitCode.CONFIG:d}"]
    assert unit["LimitMEMLOCK"] == ["infinity"]
    assert unit["User"] == unit["Group"] == ["kvtierd"]


def test_root_installation_is_complete_and_uninstalling_leaves_the_operators_files(tmp_path: Path) -> None:
    words = ["systemd", "install", "--root", str(tmp_path), "--bindir", "/usr/local/bin"]
    assert cli.main(words) == 0
    assert _files(tmp_path) == INSTALLED
    unit = (tmp_path / "usr/local/lib/systemd/system/kvtierd.service").read_text()
    assert "ExecStart=/usr/local/bin/kvtierd\n" in unit
    assert "/usr/bin/kvtierd" not in unit
    configuration = tmp_path / "etc/kvtierd/kvtierd.yaml"
    configuration.write_text("host: {capacity: 2GiB}\n")
    assert cli.main(words) == 0
    assert configuration.read_text() == "host: {capacity: 2GiB}\n"
    assert cli.main(["systemd", "uninstall", "--root", str(tmp_path)]) == 0
    assert _files(tmp_path) == {"etc/kvtierd/kvtierd.yaml"}


def test_another_prefix_is_for_packagers(tmp_path: Path) -> None:
    words = ["systemd", "install", "--root", str(tmp_path), "--prefix", "/usr", "--bindir", "/usr/bin"]
    assert cli.main(words) == 0
    assert (tmp_path / "usr/lib/systemd/system/kvtierd.service").read_text() == UNIT.read_text()


def test_command_that_the_service_would_not_see_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["systemd", "install", "--bindir", "/run/user/1000/bin"]) == 64
    assert "ProtectHome=yes" in capsys.readouterr().err


def test_place_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "usr").write_text("")
    assert cli.main(["systemd", "install", "--root", str(tmp_path), "--bindir", "/usr/bin"]) == 74
    assert f"cannot write {tmp_path}/usr/local" in capsys.readouterr().err


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd is not installed; make test-system needs it"
)
def test_exposure_is_at_most_2() -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout.splitlines()[-1:]
