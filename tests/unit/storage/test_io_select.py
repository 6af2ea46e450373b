"""Which engine is taken, what it is called, and what happens where a required one is not there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.storage import IoMode, io_kvikio, io_select
from kvtierd.storage.io_select import SelectedIo
from kvtierd.storage.kvikio_trial import Verdict
from tests.unit.storage.blocks import Block, opened, put, readable, run, settings
from tests.unit.storage.test_io_posix import no_direct


def selected(directory: Path, **fields: Any) -> SelectedIo:
    io = SelectedIo(settings(directory, **fields))
    io.probe(directory)
    return io


@pytest.fixture
def no_kvikio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_select, "kvikio_may_load", lambda: "kvikio is not installed")
    monkeypatch.setitem(sys.modules, "kvikio", None)


@pytest.fixture
def machine_with_gds(monkeypatch: pytest.MonkeyPatch) -> list[Verdict]:
    """A machine where KvikIO's trial gives the verdict in the list; the library itself is not loaded."""
    verdicts = [Verdict(gds=True)]
    monkeypatch.setattr(io_select, "kvikio_may_load", lambda: "")
    monkeypatch.setattr(
        io_kvikio.KvikioIo.__init__,
        "__kwdefaults__",
        {
            **io_kvikio.KvikioIo.__init__.__kwdefaults__,
            "trial": lambda _: verdicts[0],
        },
    )
    monkeypatch.setattr(io_kvikio.KvikioIo, "load", lambda _self, _trial: None)
    return verdicts


@pytest.mark.usefixtures("no_kvikio")
def test_case_14_machine_without_gds_starts_and_names_the_mode(tmp_path: Path) -> None:
    async def check() -> None:
        io = SelectedIo(settings(tmp_path))
        async with opened(tmp_path, io) as (store, found):
            block = Block(1)
            (extent,) = await put(store, block)
            assert await readable(store, block, extent)
            assert store.mode in {IoMode.DIRECT, IoMode.BUFFERED}
            assert store.stats()["mode"] == str(store.mode)
            assert found.notes == []

    run(check)


@pytest.mark.usefixtures("no_kvikio")
@pytest.mark.parametrize(("required", "named"), [("gds", "GPUDirect Storage"), ("kvikio", "KvikIO")])
def test_case_14_required_mode_fails_loudly_at_start(tmp_path: Path, required: str, named: str) -> None:
    with pytest.raises(StartupError, match=f"nvme.require is {required}, and {named} does not work in") as caught:
        selected(tmp_path, require=required)
    assert caught.value.exit_code == ExitCode.IO
    assert "kvikio is not installed" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_kvikio")
def test_case_14_kvikio_by_name_without_the_package_says_what_to_install() -> None:
    with pytest.raises(StartupError, match=r"install kvtierd\[gpu\]") as caught:
        io_kvikio.import_kvikio()
    assert caught.value.exit_code == ExitCode.CONFIG


def test_case_13_required_o_direct_fails_loudly_where_the_mode_is_buffered(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"nvme\.require is o_direct") as caught:
        selected(tmp_path, io="posix", mode="buffered", require="o_direct")
    assert caught.value.exit_code == ExitCode.IO
    assert selected(tmp_path, io="posix", require="o_direct").mode is IoMode.DIRECT


def test_kvikio_is_taken_where_gds_works(tmp_path: Path, machine_with_gds: list[Verdict]) -> None:
    assert machine_with_gds
    assert selected(tmp_path).mode is IoMode.GDS
    assert selected(tmp_path, require="gds").mode is IoMode.GDS
    assert selected(tmp_path, io="posix").mode is IoMode.DIRECT


def test_case_14_gds_that_does_not_work_is_told_and_done_without(
    tmp_path: Path, machine_with_gds: list[Verdict]
) -> None:
    machine_with_gds[0] = Verdict(why="no nvidia-fs module")
    io = selected(tmp_path)
    assert io.mode is IoMode.DIRECT
    assert io.notes == ["KvikIO is not used: no nvidia-fs module"]
    assert selected(tmp_path, io="kvikio").mode is IoMode.KVIKIO
    assert selected(tmp_path, require="kvikio").mode is IoMode.KVIKIO
    with pytest.raises(StartupError, match="no nvidia-fs module"):
        selected(tmp_path, require="gds")


def test_case_04_kvikio_that_fails_its_trial_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine_with_gds: list[Verdict]
) -> None:
    assert machine_with_gds

    def fail(_self: object, _directory: Path) -> None:
        raise StartupError(ExitCode.IO, "KvikIO does not work here: it hangs")

    monkeypatch.setattr(io_kvikio.KvikioIo, "probe", fail)
    io = selected(tmp_path)
    assert io.mode is IoMode.DIRECT
    assert io.notes == ["KvikIO is not used: KvikIO does not work here: it hangs"]
    with pytest.raises(StartupError, match="it hangs"):
        selected(tmp_path, io="kvikio")
    with pytest.raises(StartupError, match=r"nvme\.require is gds, and .* it hangs"):
        selected(tmp_path, require="gds")


def test_refused_o_direct_is_noted_once(tmp_path: Path) -> None:
    from kvtierd.storage.io_posix import PosixIo

    io = PosixIo("auto", open_file=no_direct)
    io.probe(tmp_path)
    assert len(io.notes) == 1


def test_kvikio_is_not_imported_where_it_is_not_chosen(tmp_path: Path) -> None:
    import subprocess

    code = (
        "import sys; from pathlib import Path; from kvtierd.config.schema import Nvme;"
        "from kvtierd.storage.io_select import SelectedIo;"
        f"SelectedIo(Nvme(directory={str(tmp_path)!r}, io='posix')).probe(Path({str(tmp_path)!r}));"
        "print(sorted({'kvikio', 'torch', 'cupy', 'numba.cuda'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_kvikio_needs_is_found_out_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert io_select.kvikio_may_load() == "kvikio is not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())

    def no_driver(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(io_select.ctypes, "CDLL", no_driver)
    assert io_select.kvikio_may_load() == "there is no CUDA driver (libcuda.so.1)"
