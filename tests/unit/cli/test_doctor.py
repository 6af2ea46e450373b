"""The doctor's findings on machines that are made up, and on this one."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from kvtierd.cli import doctor, doctor_checks, doctor_disk, doctor_speeds
from kvtierd.cli import main as cli
from kvtierd.cli.finding import Finding, Verdict
from kvtierd.config.schema import Gpu, Host, Nvme, Server, Settings
from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.protocol.mapping import SharedMapping

GIB = 1 << 30


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(server=Server(runtime_dir=str(tmp_path / "r")), nvme=Nvme(directory=str(tmp_path / "d")))


@pytest.fixture
def sys_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /sys and a /proc of our own."""
    for name in ("sys", "proc"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(doctor_checks, f"_{name.upper()}", tmp_path / name)
    return tmp_path / "sys"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _add_gpu(sys_folder: Path, node: int = 0) -> None:
    device = sys_folder / "bus/pci/devices/0000:3b:00.0"
    for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", str(node))):
        _write(device / name, text)


def verdicts(found) -> dict[str, Verdict]:
    return {finding.name: finding.verdict for finding in found}


def test_whole_run_on_this_machine_names_every_check_and_exits_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["doctor", "--config", "/dev/null", "--data-dir", str(tmp_path), "--runtime-dir", str(tmp_path / "r")]
    code = cli.main([*words, "--format", "json", "--set", "host.capacity=64MiB"])
    found = json.loads(capsys.readouterr().out)
    names = {finding["name"] for finding in found["findings"]}
    wanted = {"configuration", "daemon", "kernel", "memlock", "descriptors", "memory", "shared memory", "huge pages"}
    assert wanted | {"clock", "numa", "gpu", "file system", "free space", "O_DIRECT", "GDS", "disk"} <= names
    assert code == (1 if found["failed"] else 0)
    assert list(tmp_path.iterdir()) == [], "the doctor leaves nothing behind"


def test_mistake_in_the_configuration_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["doctor", "--no-speeds", "--config", "/dev/null", "--set", "host.capacity=x", "--data-dir", str(tmp_path)]
    assert cli.main(words) == 1
    assert "fail  configuration         --set: host.capacity: 'x' is not a size" in capsys.readouterr().out


def test_quiet_doctor_says_it_with_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "-q", "--no-speeds", "--config", "/dev/null", "--set", "host.capacity=x"]) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("strict", "code"), [(False, 0), (True, 1)])
def test_what_could_be_better_counts_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, strict: bool, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Finding("disk", Verdict.WARN, "slow", "buy another"), Finding("x", Verdict.NOTE, "so it is")]
    monkeypatch.setattr(doctor, "findings", lambda _args: iter(found))
    assert cli.main(["doctor", *(["--strict"] if strict else [])]) == code
    assert capsys.readouterr().out.splitlines()[-1] == "2 checks: 0 failed, 1 could be better"


def test_check_that_cannot_look_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_settings: Settings):
        raise PermissionError(13, "Permission denied", "/sys/x")
        yield

    monkeypatch.setattr(doctor_checks, "CHECKS", (("numa", broken), ("kernel", doctor_checks.kernel)))
    args = cli.command_parser("doctor").parse_args(["--config", "/dev/null", "--no-speeds", "--data-dir", ""])
    found = list(doctor.findings(args))
    assert verdicts(found)["numa"] is Verdict.WARN
    assert "kernel" in verdicts(found)


def test_folders_open_to_everybody_or_closed_to_us_are_failures(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "r" / "default").mkdir(parents=True)
    (tmp_path / "d").mkdir()
    assert set(verdicts(doctor_checks.permissions(settings)).values()) == {Verdict.OK}
    (tmp_path / "d").chmod(0o777)
    assert verdicts(doctor_checks.permissions(settings))["data"] is Verdict.FAIL


def test_memory_that_is_not_there_is_named(sys_folder: Path, settings: Settings) -> None:
    _write(sys_folder.parent / "proc" / "meminfo", "MemTotal: 9 kB\nMemAvailable: 4194304 kB\n")
    assert verdicts(doctor_checks.memory(settings))["memory"] is Verdict.OK
    large = Settings(host=Host(capacity=8 * GIB))
    assert verdicts(doctor_checks.memory(large))["memory"] is Verdict.WARN
    _write(sys_folder.parent / "proc/self/cgroup", "0::/kvtierd\n")
    _write(sys_folder / "fs/cgroup/kvtierd/memory.max", str(GIB))
    assert verdicts(doctor_checks.memory(settings))["memory limit"] is Verdict.FAIL


@pytest.mark.parametrize(
    ("refused", "shown", "verdict", "text"),
    [
        (0, "always [never] deny", Verdict.OK, "lies in them"),
        (errno.EINVAL, "always never [deny]", Verdict.NOTE, "shmem_enabled is deny"),
        (errno.EINVAL, None, Verdict.NOTE, "Invalid argument"),
    ],
)
def test_huge_pages_of_shared_memory(
    sys_folder: Path, monkeypatch: pytest.MonkeyPatch, refused: int, shown: str | None, verdict: Verdict, text: str
) -> None:
    if shown is not None:
        _write(sys_folder / "kernel/mm/transparent_hugepage/shmem_enabled", shown)
    monkeypatch.setattr(SharedMapping, "collapse", lambda _mapping: refused)
    (finding,) = doctor_checks._huge_pages()
    assert (finding.verdict, text in finding.text) == (verdict, True)


@pytest.mark.parametrize(("source", "verdict"), [("tsc", Verdict.OK), ("hpet", Verdict.WARN)])
def test_clock_that_costs_a_system_call(sys_folder: Path, settings: Settings, source: str, verdict: Verdict) -> None:
    _write(sys_folder / "devices/system/clocksource/clocksource0/current_clocksource", source)
    assert verdicts(doctor_checks.clock(settings)) == {"clock": verdict}


def test_gpu_and_its_driver(sys_folder: Path, settings: Settings) -> None:
    wanted = Settings(gpu=Gpu(device="cuda:0"))
    assert verdicts(doctor_checks.gpu(wanted)) == {"gpu": Verdict.FAIL}
    assert verdicts(doctor_checks.gpu(settings)) == {"gpu": Verdict.NOTE}
    assert verdicts(doctor_checks.gpu(Settings(gpu=Gpu(capacity=0)))) == {"gpu": Verdict.NOTE}
    _add_gpu(sys_folder)
    (finding,) = doctor_checks.gpu(settings)
    assert (finding.verdict, finding.advice) == (Verdict.FAIL, "modprobe nvidia")
    _write(sys_folder.parent / "proc/driver/nvidia/version", "NVRM version: 580\n")
    (finding,) = doctor_checks.gpu(settings)
    assert finding.verdict is (Verdict.OK if Path("/dev/nvidia-uvm").exists() else Verdict.WARN)


def test_device_that_is_not_there_is_a_failure_and_one_that_is_gets_its_driver_looked_at(sys_folder: Path) -> None:
    wanted = Settings(gpu=Gpu(device="cuda:0"))
    (finding,) = doctor_checks.gpu(wanted)
    assert (finding.verdict, finding.advice) == (Verdict.FAIL, "set it to auto or host")
    _add_gpu(sys_folder)
    (finding,) = doctor_checks.gpu(wanted)
    assert (finding.verdict, finding.advice) == (Verdict.FAIL, "modprobe nvidia")


def test_memory_of_the_gpu_tier_counts_on_a_machine_with_a_gpu_too(sys_folder: Path) -> None:
    _write(sys_folder.parent / "proc" / "meminfo", "MemTotal: 9 kB\nMemAvailable: 4194304 kB\n")
    _add_gpu(sys_folder)
    large = Settings(gpu=Gpu(capacity=8 * GIB))
    assert verdicts(doctor_checks.memory(large))["memory"] is Verdict.WARN


def test_daemon_is_looked_for_where_clients_look(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIERD_ENDPOINT", f"ipc://{tmp_path}/elsewhere/kvtierd.sock")
    (finding,) = doctor_checks.daemon(settings)
    assert finding.verdict is Verdict.NOTE
    assert "elsewhere" in finding.text


def test_daemon_that_refuses_us_is_a_warning_and_the_run_goes_on(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused:
        def __init__(self, *_: object, **__: object) -> None:
            raise RequestError(ErrorCode.BAD_VERSION, "the client speaks versions 9 to 9; this daemon speaks 1")

    monkeypatch.setattr(doctor_checks, "Client", Refused)
    (finding,) = doctor_checks.daemon(settings)
    assert finding.verdict is Verdict.WARN
    assert "refuses: the client speaks versions 9" in finding.text


def test_disk_and_gpu_on_different_nodes_are_told(sys_folder: Path, tmp_path: Path, settings: Settings) -> None:
    for node in (0, 1):
        (sys_folder / f"devices/system/node/node{node}").mkdir(parents=True)
    _add_gpu(sys_folder, node=1)
    device = tmp_path.stat().st_dev
    disk = sys_folder / f"dev/block/{os.major(device)}:{os.minor(device)}"
    _write(disk / "device/numa_node", "0")
    assert verdicts(doctor_checks.placement(settings)) == {"numa": Verdict.WARN}
    _write(disk / "device/numa_node", "1")
    assert verdicts(doctor_checks.placement(settings)) == {"numa": Verdict.OK}


@pytest.mark.parametrize(("kind", "verdict"), [("ext4", Verdict.OK), ("tmpfs", Verdict.WARN), ("nfs4", Verdict.WARN)])
def test_kind_of_file_system(settings: Settings, monkeypatch: pytest.MonkeyPatch, kind: str, verdict: Verdict) -> None:
    monkeypatch.setattr(doctor_disk, "mount_of", lambda _folder: (kind, "dev"))
    assert verdicts(doctor_disk.file_system(settings))["file system"] is verdict


def test_case_13_refused_o_direct_is_a_warning_or_a_failure_where_it_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_disk.PosixIo, "_try", _refuse)
    free = Settings(nvme=Nvme(directory=str(tmp_path)))
    required = Settings(nvme=Nvme(directory=str(tmp_path), require="o_direct"))
    assert verdicts(doctor_disk.direct(free)) == {"O_DIRECT": Verdict.WARN}
    assert verdicts(doctor_disk.direct(required)) == {"O_DIRECT": Verdict.FAIL}


def _refuse(io, _directory: Path) -> None:
    if io.mode == "o_direct":
        raise OSError(22, "Invalid argument")


def test_case_14_machine_without_gds_is_told_why(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_disk, "kvikio_may_load", lambda: "kvikio is not installed")
    (finding,) = doctor_disk.gds(settings)
    assert (finding.verdict, finding.text) == (Verdict.NOTE, "not used: kvikio is not installed")
    required = Settings(nvme=Nvme(directory=settings.nvme.directory, require="gds"))
    assert verdicts(doctor_disk.gds(required)) == {"GDS": Verdict.FAIL}


def test_speeds_leave_no_file(tmp_path: Path) -> None:
    (finding,) = doctor_speeds.disk(Settings(nvme=Nvme(directory=str(tmp_path))))
    assert "writes" in finding.text
    assert list(tmp_path.iterdir()) == []


def test_without_an_nvme_tier_the_disk_is_left_alone() -> None:
    none = Settings(nvme=Nvme(directory=""))
    assert [list(check(none)) for _, check in (*doctor_disk.CHECKS[1:], ("disk", doctor_speeds.disk))] == [[], [], []]
