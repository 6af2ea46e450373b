"""Where peers are installed: environments of their own beside the checkout, made by `make bench-peers`."""

from __future__ import annotations

import socket
from pathlib import Path

ENVIRONMENTS = {
    "lmcache": ".venv-engines-lmcache",
    "mooncake": ".venv-peers-mooncake",
    "vllm": ".venv-engines-vllm",
    "transformers": ".venv-engines-transformers",
}
PROGRAMS = {"lmcache": "lmcache", "mooncake": "mooncake_master", "vllm": "vllm", "transformers": "python"}
"""What must be there for a peer to count as installed."""


def interpreter(peer: str, folder: Path | None = None) -> Path | None:
    """The interpreter of a peer's environment below a folder (where we are), or None where it is not installed."""
    # Not resolved: the interpreter's own path is how it knows its environment.
    programs = (folder or Path.cwd()).absolute() / ENVIRONMENTS[peer] / "bin"
    return programs / "python" if (programs / PROGRAMS[peer]).exists() else None


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens at now, different ones."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
