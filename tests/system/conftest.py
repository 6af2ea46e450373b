"""The service as people get it: a wheel, installed into a machine with a systemd of its own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "/usr/lib/kvtierd"
BINDIR = f"{LIBRARY}/venv/bin"
SETTINGS = """\
host: {capacity: 64MiB, chunk_bytes: 16MiB}
gpu: {capacity: 16MiB}
nvme: {capacity: 256MiB, segment_bytes: 16MiB}
max_blocks: 65536
"""
DROP_IN = """\
[Unit]
StartLimitIntervalSec=0
[Service]
WatchdogSec=3
TimeoutAbortSec=1
"""


EXPOSURE: list[str] = []


@pytest.fixture(scope="session")
def exposure() -> list[str]:
    """What systemd-analyze says of the unit, for the closing lines."""
    return EXPOSURE


def pytest_terminal_summary(terminalreporter) -> None:
    for line in EXPOSURE:
        terminalreporter.write_line(line)


def _load(name: str):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A booted machine that sees the interpreter, its packages and our wheel, and none of our sources."""
    if os.geteuid():
        pytest.exit("test-system boots a systemd and must be root", returncode=1)
    if missing := [name for name in ("unshare", "nsenter", "systemd-analyze") if shutil.which(name) is None]:
        pytest.exit(f"test-system needs {', '.join(missing)}: apt-get install systemd util-linux", returncode=1)
    folder = tmp_path_factory.mktemp("machine")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder / "dist", ROOT],
        check=True,
        capture_output=True,
    )
    shares = {"dist": folder / "dist", "packages": Path(sysconfig.get_path("purelib"))}
    # An interpreter in a home folder is invisible to the service, so it is seen at another place.
    shares["python"] = Path(sys.base_prefix)
    module = _load("machine")
    started = module.Machine(folder / "layers", LIBRARY, shares)
    try:
        started.start()
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="session")
def installed(machine):
    """The wheel in an environment of its own, and the service installed by its own command."""
    python = f"{LIBRARY}/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    machine.run(python, "-m", "venv", f"{LIBRARY}/venv")
    (wheel,) = (path.name for path in machine._shares["dist"].glob("*.whl"))
    machine.run(f"{BINDIR}/pip", "install", "--quiet", "--no-deps", "--no-index", f"{LIBRARY}/dist/{wheel}")
    site = machine.run(f"{BINDIR}/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    machine.write(f"{site.stdout.strip()}/packages.pth", f"{LIBRARY}/packages\n")
    machine.write("/etc/kvtierd/conf.d/test.yaml", SETTINGS)
    machine.write("/etc/systemd/system/kvtierd.service.d/test.conf", DROP_IN)
    machine.install = machine.run(f"{BINDIR}/kvtierctl", "systemd", "install")
    yield machine
    machine.run("systemctl", "stop", "kvtierd")
    machine.uninstall = machine.run(f"{BINDIR}/kvtierctl", "systemd", "uninstall")


@pytest.fixture
def service(installed):
    """The service, running; a failure leaves its journal in the report."""
    unit = _load("service").Service(installed, BINDIR)
    unit.ensure_running()
    yield unit
    sys.stderr.write(unit.journal_text()[-4000:])
