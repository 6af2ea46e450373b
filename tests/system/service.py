"""What the tests ask of the unit and its daemon."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable

UNIT = "kvtierd.service"
PATIENCE_S = 60.0

CLIENT = """
import sys
import numpy as np
from kvtierd import Client, Geometry, Namespace, block_keys
shape = Geometry(block_size=16, layers=2, kv_heads=2, k_dim=64, v_dim=64)
blocks = np.random.default_rng(7).integers(0, 256, (32, shape.block_bytes), np.uint8)
with Client(timeout_s=10, transfer_timeout_s=20) as client:
    model = client.register(Namespace(model=sys.argv[2], revision="1", geometry=shape))
    keys = block_keys(model.digest, range(32 * 16), shape.block_size)
    if sys.argv[1] == "store":
        print(client.store(model, keys, blocks).stored)
        if "--flush" in sys.argv:
            client.flush()
    elif sys.argv[1] == "hold":
        with client.reserve(model, keys) as slots:
            print("holds", len(slots.views), flush=True)
            sys.stdin.read()
    else:
        found = client.fetch(model, keys)
        assert (found.blocks == blocks[: found.count]).all()
        print(found.count)
"""


class Service:
    """The unit, as systemctl and clients see it."""

    def __init__(self, machine, bindir: str) -> None:
        self.machine = machine
        self.bindir = bindir

    def ensure_running(self) -> None:
        self.machine.run("systemctl", "reset-failed", UNIT, check=False)
        done = self.machine.run("systemctl", "start", UNIT, check=False)
        assert not done.returncode, f"the service did not start:\n{self.journal_text()[-4000:]}"

    def systemctl(self, verb: str, *, check: bool = True):
        return self.machine.run("systemctl", verb, UNIT, check=check)

    def show(self, *names: str) -> dict[str, str]:
        lines = self.machine.run("systemctl", "show", UNIT, f"--property={','.join(names)}").stdout.splitlines()
        return dict(line.split("=", 1) for line in lines)

    def pid(self) -> int:
        return int(self.show("MainPID")["MainPID"])

    def runs_again(self, before: int) -> bool:
        """Whether another process serves. Asked at once, for without one a unit stays active for a moment."""
        shown = self.show("ActiveState", "SubState", "MainPID")
        serves = (shown["ActiveState"], shown["SubState"]) == ("active", "running")
        return serves and int(shown["MainPID"]) not in {0, before}

    def most_locked_memory(self) -> str:
        """What the machine's first process may pass on: in a container without CAP_SYS_RESOURCE that is a number."""
        limits = self.machine.run("cat", "/proc/1/limits").stdout.splitlines()
        return next(line for line in limits if line.startswith("Max locked memory")).split()[4]

    def kill(self, name: str) -> None:
        self.machine.run("systemctl", "kill", "--kill-whom=main", f"--signal={name}", UNIT)

    def kvtierctl(self, *words: str, check: bool = True):
        return self.machine.run(f"{self.bindir}/kvtierctl", *words, check=check)

    def client(self, verb: str, model: str, *words: str) -> int:
        """Store or fetch 32 blocks in a namespace of this model; how many."""
        words = (verb, model, *words)
        return int(self.machine.run(f"{self.bindir}/python", "-c", CLIENT, *words, user="kvtierd").stdout)

    def holder(self, model: str):
        """A client that holds reservations until its input ends; it runs."""
        enter = ["nsenter", "--target", str(self.machine._init), "--all", "--root", "env", "-i", "--chdir=/"]
        words = [f"{self.bindir}/python", "-c", CLIENT, "hold", model]
        command = [*enter, "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "runuser", "-u", "kvtierd", "--", *words]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert process.stdout.readline().startswith("holds")
        return process

    def number(self, name: str) -> float:
        """A metric's value."""
        line = next(line for line in self.get("/metrics").splitlines() if line.startswith(f"{name} "))
        return float(line.split()[-1])

    def get(self, path: str) -> str:
        """A page of the metrics' port."""
        code = f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:9464{path}').read().decode(), end='')"
        return self.machine.run(f"{self.bindir}/python", "-c", code).stdout

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline_s, f"not within {PATIENCE_S} s: {what}"
            time.sleep(0.1)

    def journal(self) -> list[dict[str, str]]:
        """Every line of the unit, with all its fields."""
        self.machine.run("journalctl", "--sync")
        output = self.machine.run("journalctl", f"--unit={UNIT}", "--output=json", "--no-pager").stdout
        return [json.loads(line) for line in output.splitlines()]

    def journal_text(self) -> str:
        return "\n".join(str(line.get("MESSAGE", "")) for line in self.journal())
