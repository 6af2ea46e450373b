"""A client process of the stress: does what it is told, line by line (JSON on stdin and stdout).

`python -P -m kvtierd.stress.worker CONFIG`. Each command is answered by any number of `{"progress": …}` and
`{"ledger": …}` lines and then one `{"done": …}` or `{"error": …}`. It ends with its input.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvtierd.core.geometry import Geometry
from kvtierd.protocol.client import Client
from kvtierd.stress.content import Content

_PR_SET_PDEATHSIG = 1
TIMEOUT_S = 60.0
"""Of every call: a stall is a slow figure, and no miss."""


class Tools:
    """What every job needs: content, a client with the namespace registered, and a way to tell the parent."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.number = int(config["number"])
        self.lossy = bool(config["lossy"])
        self.heads = int(config["heads"])
        self.blocks = int(config["blocks"])
        """Blocks of the context, stream 0."""
        self.content = Content(config["seed"], msgspec.convert(config["geometry"], Geometry), lossy=self.lossy)
        timeout_s = float(config.get("timeout_s", TIMEOUT_S))
        self.client = Client(
            config["endpoint"],
            timeout_s=timeout_s,
            transfer_timeout_s=timeout_s,
            copy_threads=1,
            name=f"stress-{self.number}",
        )
        self.handle = self.client.register(self.content.namespace, allow_loss=self.lossy)
        self.keys = self.content.keys((0, self.blocks))

    def tell(self, **line: object) -> None:
        """Tell the parent."""
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


Job = Callable[[Tools, Mapping[str, Any]], object]


def _jobs() -> dict[str, Job]:
    # Deferred: each needs Tools of this module.
    from kvtierd.stress import decode, ingest, mixed, verify

    return {
        "generate": ingest.generate,
        "ingest": ingest.ingest,
        "hot": verify.hot,
        "verify": verify.verify,
        "verify_prompts": verify.verify_prompts,
        "decode": decode.decode,
        "mixed": mixed.mixed,
        "lookups": mixed.lookups,
        "look": mixed.look,
    }


def _die_with_the_parent() -> None:
    """A parent that is killed closes our input, but in the midst of a job we would not look at it for minutes."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def main() -> int:
    """Work until the input ends."""
    _die_with_the_parent()
    tools, jobs = Tools(json.loads(sys.argv[1])), _jobs()
    tools.tell(done="ready")
    for line in sys.stdin:
        command = json.loads(line)
        try:
            result = jobs[command["do"]](tools, command)
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent reports it and gives the verdict
            tools.tell(error=f"{type(error).__name__}: {error}")
        else:
            tools.tell(done=result)
    tools.client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
