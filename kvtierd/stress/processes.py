"""Client processes: started by their command line, told what to do in JSON, killed where chaos wants it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from kvtierd.core.errors import KvtierdError

READY_S = 120.0
"""Until a client has loaded its compiled code, which the first one on a machine compiles."""
SILENCE_S = 180.0
"""A client that tells nothing for so long hangs."""
Message = Mapping[str, Any]
Progress = Callable[[int], None]


class StressError(KvtierdError):
    """The stress cannot go on: what failed is in the text. It is no verdict about blocks."""


class ClientGoneError(StressError):
    """A client process ended."""


def child_environment() -> dict[str, str]:
    """Of a process that is to run this package, and not what else may be installed."""
    environment = dict(os.environ, OPENBLAS_NUM_THREADS="1", OMP_WAIT_POLICY="passive")
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}


class ClientProcess:
    """One `kvtierd.stress.worker`."""

    def __init__(self, config: Mapping[str, Any], log: Path) -> None:
        self.config = config
        self._log_path = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvtierd.stress.worker", json.dumps(config)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=child_environment(),
                start_new_session=True, text=True,
            )  # fmt: skip
        self._told: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"stress-{config['number']}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def _read(self) -> None:
        output = self._process.stdout
        assert output is not None
        for line in output:
            try:
                self._told.put(json.loads(line))
            except ValueError:  # the half line of a process that was killed
                break
        self._told.put(None)

    def tell(self, command: Message) -> None:
        """Give it a job. Raises ClientGoneError where it has ended."""
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(command) + "\n")
            pipe.flush()
        except OSError as error:
            raise ClientGoneError(f"client {self.config['number']} has ended: {self._tail()}") from error

    def hear(self, timeout_s: float = SILENCE_S) -> Message:
        """The next thing it says. Raises StressError where it reports an error, ends or hangs."""
        try:
            message = self._told.get(timeout=timeout_s)
        except queue.Empty:
            raise StressError(f"client {self.config['number']} says nothing for {timeout_s:.0f} s") from None
        if message is None:
            raise ClientGoneError(f"client {self.config['number']} ended with {self._process.wait()}: {self._tail()}")
        if "error" in message:
            raise StressError(f"client {self.config['number']}: {message['error']}")
        return message

    def heard(self) -> bool:
        """Whether there is something to hear."""
        return not self._told.empty()

    def last_words(self) -> list[Message]:
        """Of a process that has ended: all that it said and nobody has heard."""
        found = []
        while not self._told.empty():
            message = self._told.get()
            if message is not None:
                found.append(message)
        return found

    def kill(self) -> None:
        """SIGKILL, as a crash ends it."""
        self._process.kill()
        self._close()

    def close(self) -> None:
        """Let it end; kill it where it does not."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
        self._close()

    def _close(self) -> None:
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            _close_pipe(pipe)

    def _tail(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()[-8:]
        return "\n".join(lines)


def _close_pipe(pipe: IO[str] | None) -> None:
    assert pipe is not None
    try:
        pipe.close()
    except BrokenPipeError:  # what was on its way to a process that was killed
        return


class Crew:
    """All client processes of a run."""

    def __init__(self, configs: Sequence[Mapping[str, Any]], folder: Path) -> None:
        self.members: list[ClientProcess] = []
        self._folder = folder
        try:
            for config in configs:
                self.members.append(self._start(config))
            for member in self.members:
                member.hear(READY_S)
        except BaseException:
            self.close()
            raise

    def _start(self, config: Mapping[str, Any]) -> ClientProcess:
        return ClientProcess(config, self._folder / f"client-{config['number']}.log")

    @property
    def pids(self) -> list[int]:
        """Of all."""
        return [member.pid for member in self.members]

    def run(self, commands: Sequence[Message], progress: Progress = lambda _count: None) -> list[Any]:
        """Give each of the first members its command and wait for all: their results, in order."""
        members = self.members[: len(commands)]
        for member, command in zip(members, commands, strict=True):
            member.tell(command)
        results: dict[int, Any] = {}
        quiet_since_s = time.monotonic()
        while len(results) < len(members):
            for number, member in enumerate(members):
                while number not in results and member.heard():
                    message = member.hear()
                    quiet_since_s = time.monotonic()
                    if "done" in message:
                        results[number] = message["done"]
                    else:
                        progress(int(message.get("progress", 0)))
            if time.monotonic() - quiet_since_s > SILENCE_S:
                raise StressError(f"no client says anything for {SILENCE_S:.0f} s")
            time.sleep(0.002)
        return [results[number] for number in range(len(members))]

    def replace(self, number: int) -> tuple[ClientProcess, ClientProcess]:
        """Kill a client with SIGKILL and start another in its place: the old one, of which there may be something left
        to hear, and the new one, which is not ready yet."""
        old = self.members[number]
        old.kill()
        self.members[number] = self._start(old.config)
        return old, self.members[number]

    def close(self) -> None:
        """End all."""
        for member in self.members:
            member.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
