from __future__ import annotations

import errno
import grp
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvtierd.config.schema import Nvme, Server, Settings, Tenant
from kvtierd.config.tenants import MAX_IPC_PATH_BYTES, SOCKET_NAME_BYTES
from kvtierd.core.errors import StartupError
from kvtierd.daemon.directories import Places, prepare_data, prepare_runtime
from kvtierd.daemon.lock import RuntimeLock
from kvtierd.protocol import endpoint


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return _places(tmp_path / "run", tmp_path / "data")


def _places(runtime: Path, data: Path) -> Places:
    return Places.of(Settings(server=Server(runtime_dir=str(runtime)), nvme=Nvme(directory=str(data))))


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_are_made_with_their_modes_whatever_the_umask(places: Places) -> None:
    before = os.umask(0o077)
    try:
        prepare_runtime(places)
        prepare_data(places)
    finally:
        os.umask(before)
    assert [_mode(folder) for folder in (places.runtime, places.tenant, *places.data)] == [0o755, 0o750, 0o750]


def test_mode_of_a_folder_that_exists_is_the_operators(places: Places) -> None:
    places.tenant.mkdir(parents=True)
    places.tenant.chmod(0o770)
    prepare_runtime(places)
    assert _mode(places.tenant) == 0o770


@pytest.mark.parametrize("parent", ["file", "/proc"])
def test_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path, parent: str) -> None:
    (tmp_path / "file").write_text("")
    folder = (tmp_path / parent).resolve() / "sub"
    with pytest.raises(StartupError, match="cannot be made") as caught:
        prepare_data(_places(tmp_path / "run", folder))
    assert caught.value.exit_code == 74
    assert "\n" not in str(caught.value)


def test_folder_that_everybody_may_write_is_refused(places: Places) -> None:
    places.tenant.mkdir(parents=True)
    places.tenant.chmod(0o777)
    with pytest.raises(StartupError, match="chmod o-w"):
        prepare_runtime(places)


def test_socket_names_fit_what_the_configuration_reserves() -> None:
    for name in (endpoint.SOCKET_NAME, endpoint.ARENA_NAME, endpoint.EVENTS_NAME):
        assert len(name) <= SOCKET_NAME_BYTES
    assert endpoint.MAX_PATH_BYTES == MAX_IPC_PATH_BYTES


def test_second_daemon_on_a_runtime_folder_is_refused(tmp_path: Path) -> None:
    first = RuntimeLock(tmp_path / "lock")
    with pytest.raises(StartupError, match=f"pid {os.getpid()},") as caught:
        RuntimeLock(tmp_path / "lock")
    assert caught.value.exit_code == 75
    assert "\n" not in str(caught.value)
    first.release()
    RuntimeLock(tmp_path / "lock").release()


def test_lock_of_a_killed_daemon_is_free(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib; from kvtierd.daemon.lock import RuntimeLock;"
        "lock = RuntimeLock(pathlib.Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "lock")], stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(StartupError, match=f"pid {child.pid},"):
            RuntimeLock(tmp_path / "lock")
        child.kill()
        child.wait()
    RuntimeLock(tmp_path / "lock").release()


def test_lock_on_a_full_disk_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kvtierd.daemon.lock.os.pwrite", full)
    with pytest.raises(StartupError, match="cannot be written: No space left") as caught:
        RuntimeLock(tmp_path / "lock")
    assert caught.value.exit_code == 74
    monkeypatch.undo()
    RuntimeLock(tmp_path / "lock").release()


def test_lock_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(StartupError) as caught:
        RuntimeLock(tmp_path / "lock")
    assert caught.value.exit_code == 74
    assert (tmp_path / "victim").read_text() == "precious"


def with_tenants(tmp_path: Path, **tenants: Tenant) -> Places:
    return Places.of(Settings(server=Server(runtime_dir=str(tmp_path / "run")), tenants=tenants))


def test_every_tenant_has_a_folder_with_its_mode(tmp_path: Path) -> None:
    places = with_tenants(tmp_path, a=Tenant(), b=Tenant(mode="0700"), default=Tenant(mode="0755"))
    prepare_runtime(places)
    found = {folder.name: _mode(folder.path) for folder in places.tenants}
    assert found == {"default": 0o755, "a": 0o750, "b": 0o700}
    assert places.tenant.name == "default", "that of server.tenant is first"


def test_tenants_folder_that_is_open_to_everybody_is_refused(tmp_path: Path) -> None:
    places = with_tenants(tmp_path, a=Tenant())
    (tmp_path / "run" / "a").mkdir(parents=True)
    (tmp_path / "run" / "a").chmod(0o755)
    with pytest.raises(StartupError, match="tenant a is open to everybody") as caught:
        prepare_runtime(places)
    assert caught.value.exit_code == 74


def test_folder_and_sockets_are_given_to_the_tenants_group(tmp_path: Path) -> None:
    group = next((entry for gid in os.getgroups() if (entry := grp.getgrgid(gid)).gr_gid != os.getegid()), None)
    group = group or grp.getgrgid(os.getegid())
    if os.geteuid() == 0:
        group = grp.getgrnam("daemon")
    places = with_tenants(tmp_path, a=Tenant(group=group.gr_name))
    prepare_runtime(places)
    folder = places.tenants[1]
    socket = folder.path / "s"
    socket.touch()
    folder.settle(socket)
    assert {folder.path.stat().st_gid, socket.stat().st_gid} == {group.gr_gid}
    assert _mode(socket) == 0o660


def test_group_that_is_not_there_is_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no group 'nobodys-group'") as caught:
        prepare_runtime(with_tenants(tmp_path, a=Tenant(group="nobodys-group")))
    assert caught.value.exit_code == 78
