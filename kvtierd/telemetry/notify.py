"""Telling systemd, or whoever set NOTIFY_SOCKET, how the service is (sd_notify(3))."""

from __future__ import annotations

import os
import socket


def notify(state: str) -> bool:
    """Send a state such as `READY=1`; False where nobody listens. Never raises: a status must not stop a service."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):  # the abstract namespace is written with a zero byte
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.sendto(state.encode(), address)
    except OSError:
        return False
    return True
