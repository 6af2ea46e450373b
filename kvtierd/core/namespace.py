"""What must match for KV to be reusable, and its digest (protocol/SPEC.md §3)."""

from __future__ import annotations

import blake3
import msgspec

from kvtierd.core.geometry import Geometry

FORMAT_VERSION = 1
"""Part of the digest: a change of the canonical encoding makes every old block a miss."""

MAX_TEXT_BYTES = 1024
DIGEST_BYTES = 32
_CONTEXT = b"kvtierd namespace"


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that shapes the KV of a model beside the tokens; a change of any field is a miss.

    `tenant_salt` separates users of one model; `revision` is the weights' revision or fingerprint;
    `lora` and `lora_version` name an adapter; `rope_digest` and `quantisation` are free text made by the
    engine; `group` tells several cache groups of one model apart (hybrid models, sliding windows).
    Raises ValueError when a text is too long or a rank is out of range.
    """

    model: str
    geometry: Geometry
    revision: str = ""
    tenant_salt: str = ""
    lora: str = ""
    lora_version: str = ""
    rope_digest: str = ""
    quantisation: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    group: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        if not self.model:
            raise ValueError("model is empty; name the model, and its revision where there is one")
        for name, value in self._texts():
            size = len(value.encode())
            if size > MAX_TEXT_BYTES:
                raise ValueError(f"{name} has {size} bytes; the limit is {MAX_TEXT_BYTES}")
        for kind in ("tp", "pp"):
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size")
            if not 0 <= rank < size <= 65536:
                raise ValueError(f"{kind}_rank {rank} is not in 0..{kind}_size - 1 with {kind}_size {size}")
        if not 0 <= self.group < 65536:
            raise ValueError(f"group is {self.group}; it must be in 0..65535")

    def _check_types(self) -> None:
        # A message is checked when it is decoded; a caller's 2.0 or True would encode as another namespace.
        for name in ("tp_rank", "tp_size", "pp_rank", "pp_size", "group"):
            if type(value := getattr(self, name)) is not int:
                raise ValueError(f"{name} is {value!r}; an integer is wanted")
        for name, text in self._texts():
            if not isinstance(text, str):
                raise ValueError(f"{name} is {text!r}; a text is wanted")

    def _texts(self) -> list[tuple[str, str]]:
        names = ("tenant_salt", "model", "revision", "lora", "lora_version", "rope_digest", "quantisation")
        return [(name, getattr(self, name)) for name in names]

    def canonical(self) -> bytes:
        """Encode the fields in their fixed order: each `name=value` in UTF-8 behind its length as u32 LE."""
        shape = self.geometry
        fields = [
            *self._texts(),
            ("dtype", shape.dtype),
            ("layout", shape.layout),
            ("block_size", shape.block_size),
            ("layers", shape.layers),
            ("kv_heads", shape.kv_heads),
            ("k_dim", shape.k_dim),
            ("v_dim", shape.v_dim),
            ("tp_rank", self.tp_rank),
            ("tp_size", self.tp_size),
            ("pp_rank", self.pp_rank),
            ("pp_size", self.pp_size),
            ("group", self.group),
            ("format", FORMAT_VERSION),
        ]
        encoded = (f"{name}={value}".encode() for name, value in fields)
        return b"".join(len(item).to_bytes(4, "little") + item for item in encoded)

    def digest(self) -> bytes:
        """32 bytes: BLAKE3 over a context string and the canonical encoding."""
        return blake3.blake3(_CONTEXT + self.canonical()).digest()
