"""KvikIO for real, over a stub of the CUDA driver that is built here: its host-memory path, its trial, its errors."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.storage import stub_driver

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [
    pytest.mark.skipif(stub_driver.COMPILER is None, reason="there is no C compiler (cc) to build the driver's stub"),
    pytest.mark.skipif(importlib.util.find_spec("kvikio") is None, reason="kvikio is not installed (make install)"),
]


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub_driver.build(tmp_path_factory.mktemp("driver"))


def run(arguments: list[str], stub: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python that finds the stub."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("KVIKIO_")}
    variables |= {"LD_LIBRARY_PATH": str(stub), **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=280, check=False)


def script(code: str, stub: Path, **environment: str) -> str:
    """What a script prints; it must not fail."""
    done = run(["-c", code], stub, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.timeout(300)  # a whole suite in one test
def test_whole_suite_of_the_store_holds_over_kvikio(stub: Path) -> None:
    folders = ["tests/unit/storage", "tests/fault/storage"]
    arguments = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *folders]
    done = run(arguments, stub, KVTIERD_TEST_ENGINE="kvikio")
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


SELECT = """
from pathlib import Path
from kvtierd.config.schema import Nvme
from kvtierd.core.errors import StartupError
from kvtierd.storage.io_select import SelectedIo
directory = Path({directory!r})
io = SelectedIo(Nvme(directory=str(directory), {fields}))
try:
    io.probe(directory)
    print(io.mode, io.direct, *io.notes, sep="|")
except StartupError as error:
    print(int(error.exit_code), error, sep="|")
"""


def select(directory: Path, stub: Path, fields: str, **environment: str) -> str:
    return script(SELECT.format(directory=str(directory), fields=fields), stub, **environment)


def test_case_14_kvikio_without_gds_works_in_compat_mode_and_says_so(tmp_path: Path, stub: Path) -> None:
    said = select(tmp_path, stub, "io='kvikio'")
    assert said.startswith("kvikio-compat|True|KvikIO works in compat mode, without GPUDirect Storage: cuFile says")
    assert list(tmp_path.iterdir()) == []


def test_case_14_compat_mode_switched_off_from_outside_does_not_hang(tmp_path: Path, stub: Path) -> None:
    assert select(tmp_path, stub, "io='kvikio'", KVIKIO_COMPAT_MODE="OFF").startswith("kvikio-compat|")


def test_case_14_required_gds_fails_loudly_where_kvikio_has_none(tmp_path: Path, stub: Path) -> None:
    said = select(tmp_path, stub, "require='gds'")
    assert said.startswith("74|nvme.require is gds, and GPUDirect Storage does not work in")
    assert "cuFile says that it is not available" in said
    assert len(said.splitlines()) == 1


def test_case_14_auto_takes_our_own_engine_where_kvikio_has_no_gds(tmp_path: Path, stub: Path) -> None:
    assert select(tmp_path, stub, "").startswith("o_direct|True|KvikIO is not used: cuFile says")


def test_case_04_wrong_environment_of_kvikio_is_one_clear_line(tmp_path: Path, stub: Path) -> None:
    said = select(tmp_path, stub, "io='kvikio'", KVIKIO_NTHREADS="many")
    assert said.startswith("74|KvikIO does not work here:")
    assert "KVIKIO_NTHREADS" in said
    assert len(said.splitlines()) == 1


TRIAL = """
from kvtierd.core.errors import StartupError
from kvtierd.storage.kvikio_trial import Trial, run_trial
try:
    print(run_trial(Trial({directory!r}, 2, 1 << 20, True), timeout_s={timeout}))
except StartupError as error:
    print(int(error.exit_code), error)
"""


def test_case_14_driver_that_hangs_is_given_up(tmp_path: Path) -> None:
    stub = stub_driver.build(tmp_path, version=stub_driver.HANGING)
    said = script(TRIAL.format(directory=str(tmp_path), timeout=3), stub)
    assert said == "74 KvikIO does not work here: it hangs: no answer within 3 s; set nvme.io to posix"


def test_case_04_driver_that_crashes_costs_the_trial_and_nothing_else(tmp_path: Path) -> None:
    stub = stub_driver.build(tmp_path, version=stub_driver.CRASHING)
    said = script(TRIAL.format(directory=str(tmp_path), timeout=30), stub)
    assert said.startswith("74 KvikIO does not work here: it ended with -6")


DEVICE = """
from pathlib import Path
from kvtierd.storage.io_kvikio import KvikioIo
from kvtierd.storage.kvikio_trial import Trial, compare_device
directory = Path({directory!r})
io = KvikioIo(threads=2)
io.load(Trial({directory!r}, 2, 1 << 20, True))
{before}
print("<" + compare_device(io, directory / "probe-gds") + ">", *(path.name for path in directory.iterdir()))
"""


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("", "<>"),
        (
            "from kvtierd.storage.device_memory import DeviceMemory;"
            "copy = DeviceMemory.copy_in;"
            "DeviceMemory.copy_in = lambda self, source: copy(self, source[::-1].copy())",
            "<a write from device memory left other bytes in the file>",
        ),
        (
            "from kvtierd.storage.device_memory import DeviceMemory;DeviceMemory.copy_out = lambda self, target: None",
            "<a read into device memory brought other bytes than were written>",
        ),
    ],
    ids=["right", "write_wrong", "read_wrong"],
)
def test_case_04_device_memory_is_compared_byte_by_byte(tmp_path: Path, before: str, said: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    stub = stub_driver.build(tmp_path, memory=True)
    assert script(DEVICE.format(directory=str(folder), before=before), stub) == said


ERRORS = """
import errno, os
from pathlib import Path
import numpy as np
from kvtierd.storage.buffers import page_buffer
from kvtierd.storage.io_kvikio import KvikioIo
from kvtierd.storage.kvikio_trial import Verdict
directory = Path({directory!r})
io = KvikioIo(trial=lambda _: Verdict(why="stub"))
io.probe(directory)

def errno_of(call):
    try:
        return call()
    except OSError as error:
        return errno.errorcode[error.errno]

path = directory / "file"
print(errno_of(lambda: io.open(path)), errno_of(lambda: io.create(directory / "none" / "file", 4096)))
file = io.create(path, 65536)
print(errno_of(lambda: io.create(path, 4096)))
page, large = page_buffer(4096), page_buffer(32768)
print(file.read([page, large], 61440), file.read([page], 65536), file.write([large, large], 0))
os.truncate(path, 20480)
print(errno_of(lambda: file.read([page], 40960)), file.read([page, large], 16384))
file.close()
file.close()
print(errno_of(lambda: file.read([page], 0)))
"""


def test_case_04_errors_at_open_at_read_and_half_way(tmp_path: Path, stub: Path) -> None:
    said = script(ERRORS.format(directory=str(tmp_path)), stub).splitlines()
    assert said == [
        "ENOENT ENOENT",
        "EEXIST",
        "4096 0 65536",  # what lies beyond the end is not asked for: the transfer is short
        "0 4096",  # the file was cut behind our back: nothing beyond its new end, and a short transfer up to it
        "EBADF",
    ]
