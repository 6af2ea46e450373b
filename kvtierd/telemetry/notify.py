"""Telling systemd, or whoever set NOTIFY_SOCKET, how the service is (sd_notify(3))."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Final

SEND_S: Final = 2.0
"""Most that a manager which does not read its socket may hold us up."""


def notify(state: str, descriptors: Sequence[int] = ()) -> bool:
    """Send a state such as `READY=1`, with open files where it is about some; False where nobody listens.

    Never raises: a status must not stop a service.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):  # the abstract namespace is written with a zero byte
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.settimeout(SEND_S)
            channel.connect(address)
            if descriptors:
                socket.send_fds(channel, [state.encode()], list(descriptors))
            else:
                channel.send(state.encode())
    except OSError:
        return False
    return True


def notify_status(text: str) -> bool:
    """Set the one line that `systemctl status` shows; a line break would start another variable."""
    return notify(f"STATUS={' '.join(text.split())}")


def extend_timeout(seconds: float) -> bool:
    """Ask for at least so much more time than the unit allows for the start or the stop that is under way."""
    return notify(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")


def notify_reloading() -> bool:
    """Say that a reload has begun; `READY=1` ends it. The time tells systemd which of several requests it answers."""
    return notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")


def watchdog_period_s() -> float:
    """How often the service manager wants to hear of us, in seconds; 0 where it does not ask this process."""
    period, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not period.isdigit() or (pid and pid != str(os.getpid())):
        return 0.0
    return int(period) / 1e6
