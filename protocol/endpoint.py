"""The sockets of one tenant's runtime folder: names, mode, and what to do with a path that exists (SPEC.md §2)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvtierd.core.errors import ExitCode, StartupError

SOCKET_NAME = "kvtierd.sock"
ARENA_NAME = "arena.sock"
EVENTS_NAME = "events.sock"
SOCKET_MODE = 0o660
MAX_PATH_BYTES = 107
"""What a Unix socket's address has room for."""

DEFAULT_ENDPOINT = "ipc:///run/kvtierd/default/kvtierd.sock"


def default_endpoint() -> str:
    """Where clients look: $KVTIERD_ENDPOINT, else the service's default tenant."""
    return os.environ.get("KVTIERD_ENDPOINT") or DEFAULT_ENDPOINT


def path_of(endpoint: str) -> Path:
    """The socket's path. Raises ValueError for anything but `ipc://PATH`."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or not path:
        raise ValueError(f"endpoint {endpoint!r} is neither ipc:///PATH/TO/kvtierd.sock nor tcp://HOST:PORT")
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ValueError(f"the endpoint's path {path} is longer than {MAX_PATH_BYTES} bytes")
    return Path(path)


def is_remote(endpoint: str) -> bool:
    """Whether an endpoint is of another machine, `tcp://HOST:PORT`. Raises ValueError for one of neither form."""
    if endpoint.startswith("tcp://"):
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"endpoint {endpoint!r} is not of the form tcp://HOST:PORT")
        return True
    path_of(endpoint)
    return False


def why_silent(endpoint: str) -> str:
    """The likely reason that nobody answers there."""
    if is_remote(endpoint):
        return (
            "it did not answer in time; does kvtierd listen there (server.tcp), is $KVTIERD_SERVER_KEY its public key, "
            "and is this client's key among those of a tenant?"
        )
    path = path_of(endpoint)
    try:
        path.stat()
    except FileNotFoundError:
        return "there is no such socket; is kvtierd running, and is this its endpoint ($KVTIERD_ENDPOINT)?"
    except PermissionError:
        return "its folder may not be entered; is this user in the tenant's group?"
    if not os.access(path, os.W_OK):
        return "the socket may not be written to; is this user in the tenant's group?"
    return "it did not answer in time"


def prepare_path(path: Path, *, replace_stale: bool) -> None:
    """Make sure that a socket can be bound at `path`. Raises StartupError naming the path and what to do.

    ZeroMQ would silently take over a path that another daemon serves, so an existing socket is refused;
    `replace_stale` says that the caller holds the folder's lock and knows it to be a leftover.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        message = f"the socket path {path} is longer than {MAX_PATH_BYTES} bytes: choose a shorter server.runtime_dir"
        raise StartupError(ExitCode.CONFIG, message)
    try:
        mode = path.lstat().st_mode
        if stat.S_ISSOCK(mode) and replace_stale:
            path.unlink()
            return
    except FileNotFoundError:
        return
    except OSError as error:
        raise StartupError(ExitCode.IO, f"cannot prepare {path}: {error.strerror}") from error
    message = f"{path} exists: another daemon serves it, or it was left behind; stop that one or remove the file"
    raise StartupError(ExitCode.LOCKED, message)


def set_mode(path: Path) -> None:
    """Give a socket its mode. Its folder, 0750, keeps strangers out in the moment before.

    The process's umask would do it at once, but it is everybody's: a thread that made a folder meanwhile would make one
    that nobody can enter.
    """
    path.chmod(SOCKET_MODE)
