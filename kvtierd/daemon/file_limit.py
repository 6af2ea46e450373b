"""Room for descriptors: every client, chunk and segment takes some, and the usual soft limit is 1,024."""

from __future__ import annotations

import resource

from kvtierd.config.schema import Settings
from kvtierd.daemon.tenants import sessions_max

PER_SESSION = 3
"""The ZeroMQ connection, the arena connection, and the pidfd of the process behind it."""
PER_CHUNK = 2
"""Data and generation table."""
PER_TENANT = 32
"""Its sockets, and what ZeroMQ's threads behind them have."""
SPARE = 128
"""Sockets, the lock, libraries, and segments that are being read."""


def descriptors_wanted(settings: Settings) -> int:
    """Most descriptors that the daemon opens with these settings."""
    chunks = settings.host.capacity // settings.host.chunk_bytes
    names = {settings.server.tenant, *settings.tenants}
    clients = sum(sessions_max(settings, name) for name in names) * (2 if settings.server.tcp else 1)
    return PER_SESSION * clients + PER_CHUNK * chunks + PER_TENANT * len(names) + SPARE


def raise_file_limit(settings: Settings) -> str:
    """Raise the soft limit as far as the hard one; a warning where that is not enough, else ""."""
    wanted = descriptors_wanted(settings)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if hard != resource.RLIM_INFINITY and hard < wanted:
        return (
            f"{wanted} file descriptors may be needed and {hard} are allowed; raise LimitNOFILE (ulimit -Hn), or lower "
            "server.max_sessions"
        )
    return ""
