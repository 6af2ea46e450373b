"""Faults of the disk in a running daemon, for tests alone: the setting `testing.disk_faults` names a file of them.

The file is JSON, `{"seed": 1, "faults": [{"operation": "write", "share": 0.1, "errno": "EIO", "bytes_moved": 4096}]}`,
and is read again when it changes; none, or an empty list, is a disk without faults. `operation` and `bytes_moved` are
those of kvtierd.testing.faulty_io, an `errno` of "" is a short transfer, `delay_ms` makes a call slow (alone, or before
it fails), and `share` is how many of the calls it happens to.
"""

from __future__ import annotations

import errno
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

from kvtierd.storage.io import StorageIo
from kvtierd.testing.faulty_io import Fault, FaultyIo, Operation


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
        """What goes wrong with this call, as the file of now says; a slow call waits here."""
        with self._lock:
            self._read_again()
            chosen = [f for f in self._faults if f["operation"] == operation and self._random.random() < f["share"]]
        for fault in chosen:
            if delay_ms := fault.get("delay_ms", 0):
                time.sleep(delay_ms / 1e3)
            if "errno" in fault:
                return Fault(getattr(errno, fault["errno"]) if fault["errno"] else 0, fault.get("bytes_moved", 0))
        return None

    def _read_again(self) -> None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            self._faults, self._stamp = [], (0, 0)
            return
        if (stamp := (found.st_mtime_ns, found.st_ino)) != self._stamp:
            plan = json.loads(self._path.read_text())
            self._faults, self._stamp = plan["faults"], stamp
            self._random = random.Random(plan["seed"])
