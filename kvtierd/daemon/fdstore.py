"""Descriptors that outlive the daemon: systemd's file descriptor store (sd_pid_notify_with_fds(3), sd_listen_fds(3)).

Whoever else starts the daemon may do the same: take datagrams on a Unix socket whose path is in NOTIFY_SOCKET, keep
what comes with `FDSTORE=1` under its `FDNAME`, and pass it to the next life as descriptors 3 and up, with LISTEN_PID,
LISTEN_FDS and LISTEN_FDNAMES (kvtierd.daemon.holder does).
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Final

from kvtierd.telemetry.notify import notify

log = logging.getLogger(__name__)

FIRST_FD: Final = 3
VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


class NotifyKeeper:
    """Keeps files with whoever listens on NOTIFY_SOCKET. Never raises: a cache that starts cold is better than none."""

    def keep(self, name: str, fd: int) -> None:
        """Keep a copy of a descriptor under a name."""
        # FDPOLL=0: systemd would take the end of a process, which a pidfd tells, for a reason to drop it.
        if not notify(f"FDSTORE=1\nFDPOLL=0\nFDNAME={name}", [fd]):
            log.warning("the service manager did not take %r for the next life", name)

    def forget(self, name: str) -> None:
        """Close all that is kept under a name."""
        notify(f"FDSTOREREMOVE=1\nFDNAME={name}")


def passed_files(environment: MutableMapping[str, str]) -> list[tuple[str, int]]:
    """Names and descriptors that the service manager passed to this process, each taken out of the environment.

    They are closed in programs that we start. A descriptor without a name is called `unknown`, as systemd does.
    """
    pid, count, names = (environment.pop(name, "") for name in VARIABLES)
    if pid != str(os.getpid()) or not count.isdigit():
        return []
    named = names.split(":") if names else []
    files = []
    for index in range(int(count)):
        fd = FIRST_FD + index
        try:
            os.set_inheritable(fd, False)  # noqa: FBT003 - it has no other form
        except OSError as error:
            log.warning("descriptor %d was announced and is not there: %s", fd, error.strerror)
            continue
        files.append((named[index] if index < len(named) else "unknown", fd))
    return files
