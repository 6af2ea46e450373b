"""What the demonstration runs on: a real model, a daemon of its own on a temporary folder, a real long text."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# Read when torch is first imported. Threads that spin between operations take the cores from the daemon and from
# whoever else runs: on two busy cores a forward pass over 32 tokens took 7 to 14 s with them and 0.5 to 2 s without.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from kvtierd.connectors.model_files import MODEL_NAME, model_folder
from kvtierd.connectors.model_identity import empty_cache
from kvtierd.connectors.prefix_io import Stored
from kvtierd.connectors.transformers import PrefixStore, Restored
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.protocol.client import Client
from kvtierd.protocol.connection import Unavailable
from kvtierd.protocol.messages import Tier

PROMPT_TOKENS = 4000
NEW_TOKENS = 32
BLOCK_SIZE = 128

READY_S = 30.0
TIMEOUT_S, TRANSFER_S = 2.0, 20.0
"""Patience of the demonstration, on whatever machine: an engine's client has the defaults."""

HOST_BYTES = 512 << 20
SETTINGS = {"host__capacity": HOST_BYTES, "gpu__capacity": "512MiB", "nvme__capacity": "2GiB"}
"""The prompt's KV is 175 MiB: each tier holds it below its watermark."""

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
    """One greedy generation: seconds to its first token (restoring included), and all of its tokens."""

    first_token_s: float
    tokens: list[int]
    restored: Restored | None = None


class FirstToken:
    """A streamer for `generate` that notes when the first new token is there."""

    def __init__(self) -> None:
        self.calls = 0
        self.at_s = 0.0

    def put(self, _value: Any) -> None:
        """Called with the prompt, then with each token."""
        self.calls += 1
        if self.calls == 2:
            self.at_s = time.perf_counter()

    def end(self) -> None:
        """Nothing is held back."""


def prompt_ids(folder: Path, tokens: int) -> torch.Tensor:
    """The first `tokens` tokens of a text that every machine has: Python's own language reference. [1, tokens]."""
    from pydoc_data.topics import topics  # 400 KB of text: only for those who want it

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = "\n\n".join(topics[name] for name in sorted(topics))[: tokens * 10]
    ids: torch.Tensor = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] != tokens:
        raise ValueError(f"the text has {ids.shape[1]} tokens; {tokens} were asked for")
    return ids


class DemoRig:
    """A model, its prompt and a daemon; `with` starts the daemon and removes everything it made.

    `directory` is where the temporary folder lies: the nvme tier is on its disk.
    """

    daemon: EmbeddedDaemon
    client: Client
    store: PrefixStore

    def __init__(self, progress: Progress, directory: Path | None = None, prompt_tokens: int = PROMPT_TOKENS) -> None:
        self._progress = progress
        self._parent = directory
        folder = model_folder(progress)
        progress(f"loading {MODEL_NAME} in float32, {torch.get_num_threads()} threads")
        transformers_logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self.model: Any = model.eval()
        self.input_ids = prompt_ids(folder, prompt_tokens)
        self._saved: tuple[torch.Tensor, Any] | None = None
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = Path(tempfile.mkdtemp(prefix="kvtierd-demo-", dir=self._parent))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            self._progress(f"starting kvtierd on {folder}")
            self.daemon = stack.enter_context(EmbeddedDaemon(folder, **SETTINGS))
            self.client = stack.enter_context(
                Client(self.daemon.endpoint, timeout_s=TIMEOUT_S, transfer_timeout_s=TRANSFER_S)
            )
            self.store = PrefixStore(self.client, self.model, block_size=BLOCK_SIZE)
            self._await_daemon()
            self._progress(f"its nvme tier reads and writes with {self.client.stats()['nvme_mode']}")
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._cleanup.close()

    def cold(self) -> Generation:
        """Generate without any past: the whole prompt is computed, and the daemon has no part in it."""
        begin_s = time.perf_counter()
        cache = empty_cache(self.model)
        generation, output = self._generate(cache, begin_s)
        self._saved = (output, cache)
        return generation

    def save(self) -> Stored:
        """Store what the last cold generation left in its cache."""
        if self._saved is None:
            raise ValueError("there is nothing to save: generate cold first")
        output, cache = self._saved
        self._saved = None
        return self.store.save(output, cache)

    def served(self) -> Generation:
        """Restore the longest stored prefix and generate from there."""
        begin_s = time.perf_counter()
        restored = self.store.restore(self.input_ids)
        generation, _ = self._generate(restored.cache, begin_s)
        return dataclasses.replace(generation, restored=dataclasses.replace(restored, cache=None))

    def place(self, tier: Tier) -> None:
        """Have the prompt's blocks in one tier (and on the disk), so that it is the one that serves."""
        self.client.flush()  # what is not durable yet could not be dropped elsewhere
        if tier != "nvme":
            self.store.prefetch(self.input_ids, tier)
        others: dict[Tier, tuple[Tier, ...]] = {"gpu": ("host",), "host": ("gpu",), "nvme": ("gpu", "host")}
        self.store.drop(others[tier])

    def restart(self) -> None:
        """Stop the daemon cleanly, start it again on the same folders, and wait until the client is back."""
        self.daemon.restart()
        self._await_daemon()

    def _await_daemon(self) -> None:
        give_up_s = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(Unavailable):  # the client connects anew by itself
                self.client.ping()
                return
            if time.monotonic() > give_up_s:
                raise Unavailable(f"the daemon did not answer within {READY_S} s{self.daemon.logs()[-500:]}")
            time.sleep(0.02)

    def _generate(self, cache: Any, begin_s: float) -> tuple[Generation, torch.Tensor]:
        first = FirstToken()
        output = self.model.generate(
            self.input_ids,
            attention_mask=torch.ones_like(self.input_ids),
            past_key_values=cache,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            streamer=first,
        )
        tokens = output[0, self.input_ids.shape[1] :].tolist()
        return Generation(first.at_s - begin_s, tokens), output
