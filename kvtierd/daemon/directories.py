"""The folders of a daemon: made where possible, checked where they exist."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from pathlib import Path

from kvtierd.config.fields import split_folders
from kvtierd.config.schema import Settings
from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.core.folders import ADMIN_FOLDER
from kvtierd.daemon.tenants import TenantFolder, tenant_folders

RUNTIME_MODE = 0o755
DATA_MODE = 0o750
ADMIN_MODE = 0o700


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """Where a daemon's files lie; `tenants` are the folders of their sockets, `data` is a folder for each device."""

    runtime: Path
    tenants: tuple[TenantFolder, ...]
    data: tuple[Path, ...]

    @classmethod
    def of(cls, settings: Settings) -> Places:
        """The places that settings name."""
        runtime = Path(settings.server.runtime_dir)
        data = tuple(map(Path, split_folders(settings.nvme.directory)))
        return cls(runtime, tenant_folders(settings), data)

    @property
    def tenant(self) -> Path:
        """The folder of the tenant that is always there."""
        return self.tenants[0].path

    @property
    def lock(self) -> Path:
        """The file whose lock says that a daemon lives here."""
        return self.runtime / "lock"


def prepare_runtime(places: Places) -> None:
    """Make the folders of the sockets, or check them. Raises StartupError (74, 78) with one line."""
    _make(places.runtime, RUNTIME_MODE, "runtime folder")
    for tenant in places.tenants:
        _make(tenant.path, tenant.mode, "tenant's folder")
        tenant.verify()


def prepare_admin(places: Places) -> Path:
    """Make the folder of the operators' socket, for this user and root only. Raises StartupError (74)."""
    folder = places.runtime / ADMIN_FOLDER
    _make(folder, ADMIN_MODE, "operators' folder")
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        message = f"the operators' folder {folder} is open to others; take that right away (chmod 0700)"
        raise StartupError(ExitCode.IO, message)
    return folder


def prepare_data(places: Places) -> None:
    """Make the data folders. Raises StartupError (74) with one line, unless others are left: the tier reports it."""
    for folder in places.data:
        with contextlib.suppress(*[StartupError] * (len(places.data) > 1)):
            _make(folder, DATA_MODE, "data folder")


def _make(folder: Path, mode: int, what: str) -> None:
    try:
        missing = not folder.is_dir()
        folder.mkdir(parents=True, exist_ok=True)
        if missing:
            folder.chmod(mode)  # mkdir's own mode is cut by the umask
        status = folder.stat()
    except FileExistsError as error:
        raise StartupError(ExitCode.IO, f"the {what} {folder} is a file; name a directory") from error
    except OSError as error:
        raise StartupError(ExitCode.IO, f"the {what} {folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StartupError(
            ExitCode.IO, f"the {what} {folder} cannot be written by user {os.geteuid()}; change its owner"
        )
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise StartupError(
            ExitCode.IO, f"the {what} {folder} can be written by everybody; take that right away (chmod o-w)"
        )
