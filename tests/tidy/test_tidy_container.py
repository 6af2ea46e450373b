"""The Dockerfile installs what `make install` does, and every setting that it and its page name is one."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from kvtierd.config.loader import load

INTO = "/usr/local/lib/kvtierd"
NOWHERE = "/nonexistent/venv"


def instructions(root: Path) -> list[tuple[str, str]]:
    """(instruction, the rest on one line)."""
    text = re.sub(r"^#.*\n", "", (root / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found = (line.partition(" ") for line in text.splitlines() if line.strip())
    return [(name, " ".join(rest.split())) for name, _, rest in found]


def of(root: Path, name: str) -> list[str]:
    return [rest for found, rest in instructions(root) if found == name]


def make_arguments(root: Path) -> list[str]:
    """Of the `make install` in the Dockerfile."""
    commands = [command for run in of(root, "RUN") for command in run.split("&&")]
    (found,) = [shlex.split(command) for command in commands if command.split()[:2] == ["make", "install"]]
    return found[1:]


def steps(root: Path, *arguments: str) -> list[str]:
    """What make would do where nothing is installed yet."""
    done = subprocess.run(["make", "--dry-run", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.replace("\\\n", " ").splitlines() if not line.startswith("echo ")]


def test_dockerfile_installs_by_the_steps_of_make_install(root: Path) -> None:
    arguments = make_arguments(root)
    ours = steps(root, "install", f"VENV={NOWHERE}")
    image = steps(root, *arguments)
    given = dict(argument.split("=", 1) for argument in arguments[1:])
    assert given["VENV"] == INTO
    in_image = [line.replace(INTO, NOWHERE) for line in image]
    developing = [
        line.replace("--editable '.[dev]'", given["PACKAGE"]).replace("libgomp1 fio", "libgomp1") for line in ours
    ]
    differ = [pair for pair in zip(in_image, developing, strict=True) if pair[0] != pair[1]]
    assert [pair for pair in differ if "pip install" not in pair[0]] == [], "only what is installed differs"
    assert all(one.replace("'", "") == other.replace("'", "") for one, other in differ)
    assert "editable '" not in "".join(image), "the source is not kept in the image"
    assert any(line.endswith("kvtierctl precompile") for line in image)


def test_what_the_steps_read_is_in_the_context(root: Path) -> None:
    ignored = [line.rstrip("/") for line in (root / ".dockerignore").read_text().split()]
    named = {
        word for line in steps(root, *make_arguments(root)) for word in re.findall(r"[\w./-]+\.txt|\.ci/[\w-]+", line)
    }
    assert {"constraints.txt", "tests/kvikio-requirements.txt", ".ci/debian-packages"} <= {
        name.removeprefix("./") for name in named
    }
    for name in [*named, "kvtierd", "protocol", "storage", "gpu", "systemd", "pyproject.toml", "README.md", "LICENSE"]:
        assert (root / name).exists(), name
        assert not any(Path(name.removeprefix("./")).match(pattern) for pattern in ignored), name


def test_commands_of_the_image_are_those_of_the_package(root: Path) -> None:
    scripts = re.findall(r"^(kvtier\w+) = ", (root / "pyproject.toml").read_text(), re.MULTILINE)
    (entry,) = of(root, "ENTRYPOINT")
    (health,) = of(root, "HEALTHCHECK")
    assert re.findall(r'\["(\w+)"', entry + health) == ["kvtierd", "kvtierctl"]
    assert {"kvtierd", "kvtierctl"} <= set(scripts)
    assert of(root, "USER") == ["kvtierd"], "the daemon never needs root"


@pytest.mark.parametrize("name", ["Dockerfile", "docs/CONTAINERS.md"])
def test_every_setting_that_is_named_is_one(root: Path, name: str) -> None:
    found = dict(re.findall(r"(KVTIERD__\w+)=([\w/.]+)", (root / name).read_text()))
    assert found
    load(environment=found, etc=Path("/nonexistent"))
