"""Contradictions: settings that are right each and wrong together."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
from collections.abc import Callable, Mapping
from typing import Any

from kvtierd.config.fields import FIELDS, Value, split_folders
from kvtierd.config.origins import DEFAULT, Problem
from kvtierd.config.tenants import MAX_IPC_PATH_BYTES, ipc_path_bytes, tenants_contradictions
from kvtierd.core.folders import ADMIN_FOLDER
from kvtierd.core.units import format_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """What must hold between settings, and what to say where it does not; both take the values in order."""

    keys: tuple[str, ...]
    holds: Callable[..., bool]
    text: Callable[..., str]


def _is_host(name: str) -> bool:
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _port_is_possible(address: str) -> bool:
    return not address or 0 < int(address.rpartition(":")[2]) < 1 << 16


RULES = (
    Rule(
        ("host.capacity", "host.chunk_bytes"),
        lambda capacity, chunk: capacity >= chunk,
        lambda capacity, chunk: (
            f"{format_bytes(capacity)} is less than one chunk (host.chunk_bytes is {format_bytes(chunk)}); "
            "raise the capacity or lower chunk_bytes"
        ),
    ),
    Rule(
        ("nvme.capacity", "nvme.segment_bytes", "nvme.directory"),
        lambda capacity, segment, directory: (
            not directory or capacity == 0 or capacity >= 2 * segment * len(split_folders(directory))
        ),
        lambda capacity, segment, _: (
            f"{format_bytes(capacity)} is less than two segments (nvme.segment_bytes is {format_bytes(segment)}); "
            "raise the capacity, lower segment_bytes, or write 0 for the default; every folder has its share"
        ),
    ),
    Rule(
        ("nvme.admission", "nvme.daily_write_budget"),
        lambda admission, budget: admission != "budgeted" or budget > 0,
        lambda _admission, _budget: (
            "'budgeted' wants nvme.daily_write_budget, which is 0 (no limit); write one, or choose another admission"
        ),
    ),
    Rule(
        ("nvme.require", "nvme.mode"),
        lambda required, mode: (required, mode) != ("o_direct", "buffered"),
        lambda required, mode: f"{required} cannot be had while nvme.mode is {mode}; set nvme.mode to auto",
    ),
    Rule(
        ("nvme.require", "nvme.io"),
        lambda required, io: not (required in {"gds", "kvikio"} and io == "posix"),
        lambda required, io: f"{required} cannot be had while nvme.io is {io}; set nvme.io to auto",
    ),
    Rule(
        ("leases.ttl_ms", "leases.max_ttl_ms"),
        lambda ttl, longest: ttl <= longest,
        lambda ttl, longest: f"{ttl} is over leases.max_ttl_ms, {longest}; lower it or raise the maximum",
    ),
    Rule(
        ("server.runtime_dir", "server.tenant"),
        lambda folder, tenant: ipc_path_bytes(folder, tenant) <= MAX_IPC_PATH_BYTES,
        lambda folder, tenant: (
            f"paths of sockets in {folder}/{tenant} would have {ipc_path_bytes(folder, tenant)} bytes; the kernel "
            f"allows {MAX_IPC_PATH_BYTES}: choose a shorter folder"
        ),
    ),
    Rule(
        ("server.tcp",),
        _port_is_possible,
        lambda address: f"{address} has no port that can be; write one in 1..65535",
    ),
    Rule(
        ("metrics.listen",),
        _port_is_possible,
        lambda listen: f"{listen} has no port that can be; write one in 1..65535",
    ),
    Rule(
        ("metrics.listen",),
        lambda listen: not listen or _is_host(listen.rpartition(":")[0].strip("[]")),
        lambda listen: f"{listen} names no address of this machine; write one such as 127.0.0.1:9464",
    ),
    Rule(
        ("server.tenant",),
        lambda tenant: tenant != ADMIN_FOLDER,
        lambda tenant: f"{tenant!r} is the folder of the operators' socket; choose another name",
    ),
    Rule(
        ("nvme.directory", "server.runtime_dir"),
        lambda data, runtime: os.path.normpath(runtime) not in map(os.path.normpath, split_folders(data)),
        lambda data, _: f"{data} is also server.runtime_dir; give data and sockets a folder each",
    ),
)


def contradictions(values: Mapping[str, Value], origins: Mapping[str, str]) -> list[Problem]:
    """Check every rule whose settings are all valid; an invalid one has been reported already.

    `values` holds the parsed explicit settings, `origins` where each explicit one was written, valid or not.
    """
    known: dict[str, Any] = {key: field.default for key, field in FIELDS.items() if key not in origins} | dict(values)
    found = []
    for rule in RULES:
        if not all(key in known for key in rule.keys):
            continue
        operands = [known[key] for key in rule.keys]
        if not rule.holds(*operands):
            key = next((key for key in rule.keys if key in origins), rule.keys[0])
            found.append(Problem(origins.get(key, DEFAULT), key, rule.text(*operands)))
    return found + tenants_contradictions(known, origins)
