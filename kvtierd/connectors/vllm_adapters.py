"""Which adapter a request's KV was computed with: each gets a namespace of its own."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import msgspec

from kvtierd.connectors.vllm_plan import ModelFacts
from kvtierd.connectors.vllm_weights import fingerprint


class Adapters:
    """Facts of the base model and of each adapter; an adapter's files are read when it is first used, as vLLM does.

    Later changes of the files are ignored, because the engine keeps what it has loaded, unless a request has it load
    them again. Used from the lookup thread.
    """

    def __init__(self, base: ModelFacts) -> None:
        self.base = base
        self._known: dict[tuple[str, int, str], ModelFacts] = {}

    def renew(self) -> None:
        """The weights were changed in place, and nothing on disk names what they are now: what is stored from here on
        is found until the next such change, by this engine alone."""
        changed = f"{self.base.revision.split('+')[0]}+{uuid.uuid4().hex}"
        self.base = msgspec.structs.replace(self.base, revision=changed)
        self._known.clear()

    def facts(self, adapter: Any) -> ModelFacts:
        """The facts of a vLLM LoRARequest, or of the base model for None. Raises ValueError for an adapter whose files
        are not on this machine."""
        if adapter is None:
            return self.base
        name = (str(adapter.lora_name), int(adapter.lora_int_id), str(adapter.lora_path))
        if name not in self._known or getattr(adapter, "load_inplace", False):
            path = Path(adapter.lora_path)
            if not path.exists():
                raise ValueError(f"adapter {adapter.lora_name}: {path} is no local folder, so its weights have no name")
            version = fingerprint(path)
            self._known[name] = msgspec.structs.replace(self.base, lora=name[0], lora_version=version)
        return self._known[name]
