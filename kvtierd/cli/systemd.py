"""`kvtierctl systemd install|uninstall`: the service's files from this package, in their places.

Below /usr/local by default, which systemd searches too: a distribution's package owns /usr.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.resources
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvtierd.cli.errors import CommandError, Failure
from kvtierd.cli.manual import COMPLETION_TARGET, MANUALS, completion, manual

UNIT = "kvtierd.service"
PACKAGED_BINDIR = "/usr/bin"
"""Where the unit in the package looks for the command."""
HIDDEN = ("/home", "/root", "/run/user")
"""ProtectHome=yes: what the service does not see."""
CONFIGURATION = Path("etc/kvtierd/kvtierd.yaml")
CACHE = Path("/var/cache/kvtierd")
SERVICE_USER = "kvtierd"


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """One file: where it belongs, relative to the root, and what is in it."""

    target: Path
    text: str
    keep: bool = False
    """The operator's from the moment that it is there: neither overwritten nor removed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do, and where."""
    parser.add_argument("action", choices=["install", "uninstall"], help="put the files in place, or remove them")
    parser.add_argument("--root", type=Path, metavar="DIR", help="below this folder; no user is made, nothing is run")
    parser.add_argument("--prefix", type=Path, default=Path("/usr/local"), metavar="DIR", help="%(default)s")
    parser.add_argument("--bindir", type=Path, metavar="DIR", help="folder of the kvtierd command (else this one's)")
    parser.add_argument("--no-precompile", action="store_true", help="leave compiling kernels to the first start")


def run(args: argparse.Namespace) -> int:
    """Install or uninstall. Raises CommandError with what to do instead."""
    root = args.root or Path("/")
    if args.action == "uninstall":
        _uninstall(root, args.prefix, live=args.root is None)
        return 0
    bindir = args.bindir or _own_bindir()
    if args.root is None:
        _check_visible(bindir)
    for file in files(args.prefix, bindir):
        _place(root, file)
    if args.root is None:
        _activate(bindir, precompile=not args.no_precompile)
        print("next: edit /etc/kvtierd/kvtierd.yaml, then systemctl enable --now kvtierd")
    return 0


def files(prefix: Path, bindir: Path) -> Iterator[Placed]:
    """Every file of the service."""
    base = Path(*prefix.parts[1:]) if prefix.is_absolute() else prefix
    unit = _packaged(UNIT).replace(f"{PACKAGED_BINDIR}/kvtierd", str(bindir / "kvtierd"))
    yield Placed(base / "lib/systemd/system" / UNIT, unit)
    yield Placed(base / "lib/sysusers.d/kvtierd.conf", _packaged("kvtierd.sysusers.conf"))
    yield Placed(base / "lib/tmpfiles.d/kvtierd.conf", _packaged("kvtierd.tmpfiles.conf"))
    yield Placed(CONFIGURATION, _packaged("kvtierd.yaml"), keep=True)
    yield Placed(base / COMPLETION_TARGET, completion())
    for name, target in MANUALS.items():
        yield Placed(base / target, manual(name))


def _packaged(name: str) -> str:
    return (importlib.resources.files("kvtierd.systemd") / name).read_text()


def _own_bindir() -> Path:
    """Where the `kvtierd` command of this installation lies."""
    beside = Path(sys.executable).parent
    if (beside / "kvtierd").exists():
        return beside
    if found := shutil.which("kvtierd"):
        return Path(found).parent
    raise CommandError(Failure.USAGE, f"there is no kvtierd command in {beside} nor in $PATH; name it with --bindir")


def _check_visible(bindir: Path) -> None:
    """The command, its environment and the interpreter behind it must not lie in somebody's home folder."""
    for path in (bindir, Path(sys.prefix), Path(sys.executable).resolve()):
        if str(path).startswith(HIDDEN):
            raise CommandError(
                Failure.USAGE,
                f"{path} lies in a home folder, which the service does not see (ProtectHome=yes); install kvtierd "
                "into an environment elsewhere, such as /usr/local/lib/kvtierd, with an interpreter of the system",
            )


def _place(root: Path, file: Placed) -> None:
    target = root / file.target
    if file.keep and target.exists():
        print(f"kept       {target}")
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(file.text)
        target.chmod(0o644)
    except OSError as error:
        message = f"cannot write {target}: {error.strerror}; are you root, or is --root missing?"
        raise CommandError(Failure.IO, message) from error
    print(f"installed  {target}")


def _uninstall(root: Path, prefix: Path, *, live: bool) -> None:
    if live and _runs(["systemctl", "is-active", "--quiet", UNIT]):
        raise CommandError(Failure.USAGE, f"{UNIT} is active: systemctl disable --now kvtierd comes first")
    for file in files(prefix, Path(PACKAGED_BINDIR)):
        target = root / file.target
        if file.keep and target.exists():
            print(f"kept       {target}")
        elif target.exists():
            target.unlink()
            print(f"removed    {target}")
    if live:
        _tell_systemd(["systemctl", "daemon-reload"])
        print("kept       user kvtierd, /var/lib/kvtierd, /var/cache/kvtierd: remove them if nobody wants them back")


def _activate(bindir: Path, *, precompile: bool) -> None:
    """Make the user and the folders, tell systemd, and compile as the user that will run the kernels."""
    _tell_systemd(["systemd-sysusers", "kvtierd.conf"])
    _tell_systemd(["systemd-tmpfiles", "--create", "kvtierd.conf"])
    _tell_systemd(["systemctl", "daemon-reload"])
    if precompile:
        print("compiling kernels (a minute or two)", flush=True)
        environment = {"CACHE_DIRECTORY": str(CACHE), "PATH": os.environ.get("PATH", "")}
        command = [str(bindir / "kvtierctl"), "precompile"]
        done = subprocess.run(
            command, env=environment, check=False, user=SERVICE_USER, group=SERVICE_USER, extra_groups=[], cwd="/"
        )
        if done.returncode:
            print("kernels were not compiled; the first start will do it", file=sys.stderr)


def _tell_systemd(command: list[str]) -> None:
    try:
        done = subprocess.run(command, check=False)
    except FileNotFoundError:
        raise CommandError(
            Failure.UNAVAILABLE, f"{command[0]} is not installed: this system has no systemd; use --root to only copy"
        ) from None
    if done.returncode:
        raise CommandError(Failure.IO, f"{' '.join(command)} failed with {done.returncode}")


def _runs(command: list[str]) -> bool:
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
