"""What the daemon is at this moment, for people: SIGUSR1 writes it to the log, `kvtierctl info` shows it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from typing import Any, Protocol

log = logging.getLogger(__name__)

SECTIONS = {
    "host": ("host_", "memory_"),
    "gpu": ("gpu_",),
    "nvme": ("nvme_", "offload", "onboard", "write_queue", "recover", "table_", "quota_"),
    "server": ("server_",),
    "daemon": ("daemon_",),
}
"""Sections of statistics by the beginnings of their names; what fits none is the work of clients."""
CLIENTS = "clients"


class Describing(Protocol):
    """What can tell its state."""

    def state(self) -> Mapping[str, Any]:
        """Everything that it counts, by name."""
        ...


def in_sections(stats: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Statistics by section, each in the order of their names."""
    found: dict[str, dict[str, Any]] = {name: {} for name in (*SECTIONS, CLIENTS)}
    for name, value in sorted(stats.items()):
        found[section_of(name)][name] = value
    return found


def section_of(name: str) -> str:
    """The section of one statistic."""
    return next((section for section, begins in SECTIONS.items() if name.startswith(begins)), CLIENTS)


def dump(serving: Describing | None) -> None:
    """Write the state to the log, a line a section; before the daemon serves there is little to say."""
    tasks = sorted(task.get_name() for task in asyncio.all_tasks())
    threads = sorted(thread.name for thread in threading.enumerate())
    log.info("state: process", extra={"fields": {"tasks": tasks, "threads": threads}})
    if serving is None:
        log.info("state: starting")
        return
    for section, values in in_sections(serving.state()).items():
        log.info(f"state: {section}", extra={"fields": values})
