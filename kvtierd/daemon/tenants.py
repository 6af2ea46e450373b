"""The tenants' folders: each with the sockets of one tenant, whose mode and group the kernel enforces."""

from __future__ import annotations

import dataclasses
import grp
import os
import stat
from pathlib import Path

from kvtierd.config.schema import Settings, Tenant
from kvtierd.core.errors import ExitCode, StartupError

SOCKET_MODES = {"0700": 0o600, "0750": 0o660, "0755": 0o666}
"""Of a tenant's sockets, by the mode of its folder: whoever may enter may talk."""
OTHERS = 0o007


@dataclasses.dataclass(frozen=True, slots=True)
class TenantFolder:
    """One tenant's folder. `terms` are those of the configuration, None for a tenant that it does not name."""

    name: str
    path: Path
    terms: Tenant | None = None

    @property
    def mode(self) -> int:
        """What the folder is made with."""
        return int((self.terms or Tenant()).mode, 8)

    def verify(self) -> None:
        """Check the folder, which exists, and give it to the tenant's group. Raises StartupError (74, 78)."""
        if self.terms is None:
            return
        found = stat.S_IMODE(self.path.stat().st_mode)
        if found & OTHERS & ~self.mode:
            raise StartupError(
                ExitCode.IO,
                f"the folder {self.path} of tenant {self.name} is open to everybody (mode {found:04o}); take that "
                f"right away (chmod {self.terms.mode}), or say mode: '0755'",
            )
        self._give(self.path)

    def settle(self, socket: Path) -> None:
        """Give a socket to the tenant. Until then the folder's mode keeps strangers out. Raises StartupError."""
        if self.terms is not None:
            self._give(socket)
            socket.chmod(SOCKET_MODES[self.terms.mode])

    def _give(self, path: Path) -> None:
        if self.terms is None or not self.terms.group:
            return
        try:
            gid = grp.getgrnam(self.terms.group).gr_gid
        except KeyError:
            message = f"tenants.{self.name}.group: there is no group {self.terms.group!r}; make it (sysusers.d)"
            raise StartupError(ExitCode.CONFIG, message) from None
        try:
            if path.stat().st_gid != gid:
                os.chown(path, -1, gid)
        except OSError as error:
            raise StartupError(
                ExitCode.IO,
                f"{path} cannot be given to group {self.terms.group}: {error.strerror}; make the tenant's folder with "
                f"mode 2750 and that group (tmpfiles.d), or let the daemon be in it (SupplementaryGroups=)",
            ) from error


def tenant_folders(settings: Settings) -> tuple[TenantFolder, ...]:
    """The folder of every tenant that is served, that of `server.tenant` first."""
    runtime, first = Path(settings.server.runtime_dir), settings.server.tenant
    names = [first, *(name for name in settings.tenants if name != first)]
    return tuple(TenantFolder(name, runtime / name, settings.tenants.get(name)) for name in names)


def tenants_of_keys(settings: Settings) -> dict[str, str]:
    """Tenants by the public keys of their remote clients."""
    return {key: name for name, terms in settings.tenants.items() for key in terms.keys.split()}


def sessions_max(settings: Settings, name: str) -> int:
    """How many clients of a tenant there may be at one endpoint."""
    terms = settings.tenants.get(name)
    return terms.max_sessions if terms is not None and terms.max_sessions else settings.server.max_sessions
