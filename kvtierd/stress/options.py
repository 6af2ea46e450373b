"""What a stress is asked to do, and what follows from it: sizes of tiers, batches, what must fit on the machine."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec

from kvtierd.bench.options import available_bytes
from kvtierd.core.geometry import Geometry
from kvtierd.core.units import GIB, KIB, MIB, PAGE_BYTES, align_up, format_bytes
from kvtierd.stress.content import PRESETS
from kvtierd.stress.processes import StressError

FULL_TOKENS, QUICK_TOKENS = 1 << 20, 1 << 17
FULL_GPU, FULL_HOST = 256 * MIB, GIB
QUICK_GPU, QUICK_HOST = 32 * MIB, 128 * MIB
FULL_LAYERS = 2
"""Of the model's: a context of a million tokens then has 8 GiB of KV in the geometry of Llama-3.1-8B."""
CHUNK_BYTES = 64 * MIB
CHUNKS = 8
"""That the host tier has at least, where it is small."""
LOAD_BYTES, QUICK_LOAD_BYTES = GIB, GIB // 2
"""Stored by the mixed load, by all clients."""
CHAOS_BYTES, QUICK_CHAOS_BYTES = 3 * GIB, 3 * GIB // 2
"""Stored under chaos."""
SPARE_BYTES, QUICK_SPARE_BYTES = GIB, GIB // 2
"""On disk beside all that: segments that are not full, and what is written again after a failure."""
SEGMENT_BYTES = 64 * MIB
"""With little disk, and under chaos: a sync that fails ends the segment that was being written, however little is in
it."""
MACHINE_BYTES = 1 * GIB
"""Of memory for clients, the oracle and references, beside gpu and host."""
_COUNT = re.compile(r"\s*(\d+)\s*([kmKM]?)\s*")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """As the command line gives them; 0 or "" is the default of the form (`quick` or full)."""

    tokens: int = 0
    geometry: str = "llama-3.1-8b"
    shape: Geometry | None = None
    """Of `custom`."""
    heads: int = 0
    """Query heads of `custom`; 0 takes four for each KV head."""
    layers: int = 0
    gpu_bytes: int = -1
    host_bytes: int = 0
    nvme: Path | None = None
    endpoint: str = ""
    clients: int = 2
    fp8: bool = False
    chaos: bool = False
    seed: int = 1
    quick: bool = False
    plants: tuple[dict[str, Any], ...] = ()
    """Wrong contents on purpose (kvtierd.stress.ingest): for tests of the checks."""

    @property
    def token_count(self) -> int:
        """Tokens of the context, whole blocks."""
        wanted = self.tokens or (QUICK_TOKENS if self.quick else FULL_TOKENS)
        return wanted // self.kv.block_size * self.kv.block_size

    @property
    def kv(self) -> Geometry:
        """The geometry with the layers asked for."""
        shape = self.shape if self.geometry == "custom" else PRESETS[self.geometry][0]
        if shape is None:
            raise StressError("a custom geometry wants --block-size, --kv-heads, --k-dim and --v-dim")
        default = shape.layers if self.geometry == "custom" else min(FULL_LAYERS, shape.layers)
        return msgspec.structs.replace(shape, layers=self.layers or default)

    @property
    def query_heads(self) -> int:
        """Query heads."""
        if self.geometry == "custom":
            return self.heads or 4 * self.kv.kv_heads
        return PRESETS[self.geometry][1]

    @property
    def blocks(self) -> int:
        """Blocks of the context."""
        return self.token_count // self.kv.block_size

    @property
    def context_bytes(self) -> int:
        """KV of the context."""
        return self.blocks * self.kv.slot_bytes

    @property
    def gpu(self) -> int:
        """Budget of gpu."""
        return self.gpu_bytes if self.gpu_bytes >= 0 else QUICK_GPU if self.quick else FULL_GPU

    @property
    def host(self) -> int:
        """Budget of host."""
        return self.host_bytes or (QUICK_HOST if self.quick else FULL_HOST)

    @property
    def load_bytes(self) -> int:
        """What the mixed load may store: a store that is full recycles what is oldest, and here nothing may be lost."""
        return QUICK_LOAD_BYTES if self.quick else LOAD_BYTES

    @property
    def chaos_bytes(self) -> int:
        """What the load under chaos may store."""
        return (QUICK_CHAOS_BYTES if self.quick else CHAOS_BYTES) if self.chaos else 0

    @property
    def batch(self) -> int:
        """Blocks of a request: 16 MiB, or less where host is so small that clients would fill it with requests."""
        room = min(16 * MIB, self.host // (8 * max(1, self.clients)))
        return max(1, room // self.kv.slot_bytes)

    def settings(self, folder: Path) -> dict[str, object]:
        """Of the daemon that a stress starts."""
        chunk = CHUNK_BYTES
        while chunk > MIB and chunk * CHUNKS > self.host:
            chunk //= 2
        while chunk < self.kv.slot_bytes:
            chunk *= 2
        on_disk = self.blocks * (self.kv.slot_bytes + PAGE_BYTES)
        spare = self.load_bytes + self.chaos_bytes + (QUICK_SPARE_BYTES if self.quick else SPARE_BYTES)
        found: dict[str, object] = {
            "gpu__device": "host",
            "gpu__capacity": self.gpu,
            "host__capacity": self.host,
            "host__chunk_bytes": chunk,
            "nvme__directory": folder / "data",
            "nvme__capacity": align_up(on_disk + on_disk // 16 + spare, MIB),
        }
        if self.quick or self.chaos:
            found["nvme__segment_bytes"] = SEGMENT_BYTES
        if self.chaos:
            found["testing__disk_faults"] = folder / "faults.json"
        return found

    def check(self, folder: Path) -> None:
        """Raise StressError for what cannot be: options that contradict, or a machine too small."""
        if self.blocks < 2 * self.clients:
            raise StressError(f"{self.token_count} tokens are {self.blocks} blocks; {self.clients} clients want more")
        if not 1 <= self.clients <= 64:
            raise StressError(f"--clients is {self.clients}; 1 to 64 are wanted")
        if self.endpoint:
            if self.chaos:
                raise StressError("--chaos kills the daemon: it wants one of its own, without --endpoint")
            return
        if self.host < 4 * self.clients * self.kv.slot_bytes:
            raise StressError(f"--host {format_bytes(self.host)} holds too few blocks of {self.kv.slot_bytes} bytes")
        disk = shutil.disk_usage(folder).free
        need = int(str(self.settings(folder)["nvme__capacity"])) + (QUICK_SPARE_BYTES if self.quick else SPARE_BYTES)
        if disk < need:
            raise StressError(f"{folder} has {format_bytes(disk)} free and {format_bytes(need)} are needed; see --nvme")
        memory = self.gpu + self.host + MACHINE_BYTES
        if available_bytes() < memory:
            raise StressError(f"{format_bytes(memory)} of memory are needed; see --gpu and --host")


def parse_tokens(text: str) -> int:
    """`1M`, `131072`, `128k`: letters count in powers of 1024. ValueError for what is no count."""
    match = _COUNT.fullmatch(text)
    if match is None or not int(match[1]):
        raise ValueError(f"{text!r} is no number of tokens; write it like 131072, 128k or 1M")
    return int(match[1]) * {"": 1, "k": KIB, "m": MIB}[match[2].lower()]
