"""Exit codes and what is said, without a daemon behind it."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kvtierd.config.schema import Host, Server, Settings
from kvtierd.daemon.file_limit import descriptors_wanted

COMMAND = [sys.executable, "-m", "kvtierd.daemon.main"]


def _run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": "", **environment})


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nope"],
        ["stray"],
        ["--set", "host.capacity"],
        ["--check-config", "--print-config"],
        ["--ready-fd", "x"],
        ["--ready-fd", "987"],
        ["--stop-fd", "99999999999999999999"],
    ],
)
def test_wrong_use_exits_64_with_the_usage(arguments: list[str]) -> None:
    done = _run(*arguments)
    assert done.returncode == 64
    assert done.stderr.startswith("usage: kvtierd")


def test_check_config_prints_every_mistake_and_exits_78(tmp_path: Path) -> None:
    file = tmp_path / "kvtierd.yaml"
    file.write_text("host:\n  capasity: 1\nkv_cache_config: {gpu_watermark: 3, block_size: x}\n")
    done = _run("--config", file, "--check-config", "--set", "log.level=loud", KVTIERD__NOPE="1")
    assert done.returncode == 78
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        [f"{file}:2", "host.capasity"],
        [f"{file}:3", "kv_cache_config.gpu_watermark"],
        [f"{file}:3", "kv_cache_config.block_size"],
        ["$KVTIERD__NOPE", "nope"],
        ["--set", "log.level"],
    ]


def test_valid_configuration_exits_0_without_loading_kernels(tmp_path: Path) -> None:
    (tmp_path / "kvtierd.yaml").write_text("host: {capacity: 2GiB}\n")
    done = _run("--config", tmp_path / "kvtierd.yaml", "--check-config", "--data-dir", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the configuration is valid\n", "")
    code = f"""
import sys
from kvtierd.daemon.main import main
main(["--config", {str(tmp_path / "kvtierd.yaml")!r}, "--check-config"])
assert not {{"numba", "torch", "zmq"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_print_config_shows_values_with_their_origins(tmp_path: Path) -> None:
    done = _run("--config", "/dev/null", "--print-config", "--runtime-dir", tmp_path, KVTIERD__HOST__CAPACITY="2GiB")
    assert done.returncode == 0
    lines = {" ".join(line.split()) for line in done.stdout.splitlines()}
    assert f"runtime_dir: {tmp_path} # --runtime-dir" in lines
    assert "capacity: 2147483648 # $KVTIERD__HOST__CAPACITY" in lines
    assert "block_size: 128 # default" in lines


def test_folder_on_the_command_line_may_be_relative(tmp_path: Path) -> None:
    command = [*COMMAND, "--config", "/dev/null", "--print-config", "--data-dir", "../data"]
    environment = {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    assert f"directory: {tmp_path.parent / 'data'} " in done.stdout


def test_bug_exits_70_and_says_so(tmp_path: Path) -> None:
    code = f"""
import sys
from kvtierd.daemon import main
def broken(settings):
    raise RuntimeError("impossible")
main._load = broken
sys.exit(main.main(["--config", "/dev/null", "--data-dir", "", "--runtime-dir", {str(tmp_path)!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 70
    assert "this is a bug in kvtierd" in done.stderr
    assert "impossible" in done.stderr


def test_descriptors_are_raised_as_far_as_allowed_and_the_rest_is_a_warning() -> None:
    code = """
import resource, sys
from kvtierd.config.schema import Host, Server, Settings
from kvtierd.daemon.file_limit import descriptors_wanted, raise_file_limit
settings = Settings(server=Server(max_sessions=300))
wanted = descriptors_wanted(settings)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, wanted + 5))
assert raise_file_limit(settings) == ""
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == wanted
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 500))
assert "500 are allowed" in raise_file_limit(settings)
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 500
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    few = Settings(server=Server(max_sessions=1), host=Host(capacity=64 << 20))
    assert descriptors_wanted(few) < descriptors_wanted(Settings())
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] != 500
