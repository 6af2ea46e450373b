"""What must hold of the tenants: with each other, and with the rest of the settings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from kvtierd.config.fields import tenant_key, tenant_of
from kvtierd.config.origins import DEFAULT, Problem
from kvtierd.core.folders import ADMIN_FOLDER
from kvtierd.core.units import format_bytes

MAX_IPC_PATH_BYTES = 107
"""The kernel's sockaddr_un holds 108 bytes with the closing zero."""

SOCKET_NAME_BYTES = 16
"""No socket below a tenant's folder has a longer name (kvtierd.protocol.endpoint; a test compares)."""


MAX_TENANTS = 64
"""Each takes sockets, threads of ZeroMQ, and chunks of the arena of its own."""


def ipc_path_bytes(runtime_dir: str, tenant: str) -> int:
    """Longest path of a socket of a tenant."""
    return len(os.fsencode(runtime_dir)) + len(tenant) + SOCKET_NAME_BYTES + 2


def tenants_contradictions(known: Mapping[str, Any], origins: Mapping[str, str]) -> list[Problem]:
    """Every mistake about tenants. `known` holds the values that are valid, `origins` where each was written."""
    names = list(dict.fromkeys(filter(None, map(tenant_of, origins))))
    found = [_problem(origins, name, key, text) for name in names for key, text in _mistakes(name, known)]
    if len({*names, known.get("server.tenant")}) > MAX_TENANTS:
        found.append(_problem(origins, names[-1], "", f"there are more than {MAX_TENANTS} tenants; take some away"))
    return [*found, *_shared_keys(names, known, origins), *_nobody(names, known, origins)]


def _mistakes(name: str, known: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if name == ADMIN_FOLDER:
        yield "", f"{name!r} is the folder of the operators' socket; choose another name"
    folder = known.get("server.runtime_dir")
    if folder is not None and (nbytes := ipc_path_bytes(folder, name)) > MAX_IPC_PATH_BYTES:
        yield (
            "",
            (
                f"paths of sockets in {folder}/{name} would have {nbytes} bytes; the kernel allows "
                f"{MAX_IPC_PATH_BYTES}: choose a shorter name or folder"
            ),
        )
    for leaf, least in (("host_bytes", "host.chunk_bytes"), ("gpu_bytes", "host.chunk_bytes")):
        quota, chunk = known.get(tenant_key(name, leaf), 0), known.get(least, 0)
        if 0 < quota < chunk:
            yield leaf, f"{format_bytes(quota)} is less than one chunk ({least} is {format_bytes(chunk)}); raise it"


def _shared_keys(names: list[str], known: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[Problem]:
    """A key stands for one tenant."""
    owners: dict[str, str] = {}
    for name in names:
        for key in known.get(tenant_key(name, "keys"), "").split():
            if (owner := owners.setdefault(key, name)) != name:
                yield _problem(origins, name, "keys", f"{key} is a key of {owner} too; give each client its own")


def _nobody(names: list[str], known: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[Problem]:
    """An endpoint where nobody may come is a mistake about who should."""
    keys = [tenant_key(name, "keys") for name in names]
    if known.get("server.tcp") and all(not known.get(key, "") and (key not in origins or key in known) for key in keys):
        text = "no tenant has keys, so that no client could come; write them below tenants.NAME.keys"
        yield Problem(origins.get("server.tcp", DEFAULT), "server.tcp", text)


def _problem(origins: Mapping[str, str], name: str, leaf: str, text: str) -> Problem:
    key = tenant_key(name, leaf) if leaf else f"tenants.{name}"
    origin = origins.get(key) or next(where for other, where in origins.items() if tenant_of(other) == name)
    return Problem(origin, key, text)
