"""Faults of the disk in a running daemon, for tests alone: the setting `testing.disk_faults` names a file of them.

The file is JSON, `{"seed": 1, "faults": [{"operation": "write", "share": 0.1, "errno": "EIO", "bytes_moved": 4096}]}`,
and is read again when it changes; none, or an empty list, is a disk without faults. `operation` and `bytes_moved` are
those of kvtierd.testing.faulty_io, an `errno` of "" is a short transfer, `delay_ms` makes a call slow (alone, or before
it fails), with `stands` it waits until the file changes, and `share` is how many of the calls it happens to.
"""

from __future__ import annotations

import asyncio
import errno
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

from kvtierd.storage.io import StorageIo
from kvtierd.testing.faulty_io import Fault, FaultyIo, Operation

STEP_S = 0.02
"""How often a call that stands looks whether it may go on."""


class DiskFaults(FaultyIo):
    """A StorageIo around another, whose faults come from a file. Calls are not kept."""

    def __init__(self, inner: StorageIo, path: Path) -> None:
        super().__init__(inner)
        self._path = path
        self._stamp: tuple[int, int] = (0, 0)
        self._faults: list[dict[str, Any]] = []
        self._random = random.Random(0)
        self._lock = threading.Lock()

    def fault_of(self, operation: Operation, name: str, offset: int = 0, length: int = 0) -> Fault | None:  # noqa: ARG002
        """What goes wrong with this call, as the file of now says; a slow call waits here, one about a small file in
        `wait_small`."""
        chosen, stamp = self._chosen(operation)
        for fault in chosen:
            if not operation.endswith("_small"):
                time.sleep(fault.get("delay_ms", 0) / 1e3)
                while fault.get("stands") and self._stamp_now() == stamp:
                    time.sleep(STEP_S)
            if "errno" in fault:
                return Fault(getattr(errno, fault["errno"]) if fault["errno"] else 0, fault.get("bytes_moved", 0))
        return None

    async def wait_small(self, operation: Operation) -> None:
        """As slow as the file says, without holding up the loop: real calls are made in a thread."""
        chosen, stamp = self._chosen(operation)
        for fault in chosen:
            await asyncio.sleep(fault.get("delay_ms", 0) / 1e3)
            while fault.get("stands") and self._stamp_now() == stamp:
                await asyncio.sleep(STEP_S)

    def _chosen(self, operation: Operation) -> tuple[list[dict[str, Any]], tuple[int, int]]:
        with self._lock:
            self._read_again()
            found = [f for f in self._faults if f["operation"] == operation and self._random.random() < f["share"]]
            return found, self._stamp

    def _stamp_now(self) -> tuple[int, int]:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return (0, 0)
        return found.st_mtime_ns, found.st_ino

    def _read_again(self) -> None:
        if (stamp := self._stamp_now()) == self._stamp:
            return
        plan: dict[str, Any] = {"faults": [], "seed": 0}
        if stamp != (0, 0):
            plan = json.loads(self._path.read_text())
        self._faults, self._stamp = plan["faults"], stamp
        self._random = random.Random(plan["seed"])
