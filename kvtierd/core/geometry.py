"""From the shape of a model's KV to bytes: what one block holds and where each layer lies in it."""

from __future__ import annotations

import functools

import msgspec

from kvtierd.core.units import PAGE_BYTES, align_up

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "uint8": 1}
"""Bytes of one element for every KV dtype that a namespace may name."""

LAYOUTS = ("nhd", "hnd")
"""Layouts we compute on. Per layer: K then V, each [token, head, dim] or [head, token, dim].
Any other name must start with `opaque:`: the bytes are an engine's own and are only stored."""

MAX_LAYOUT_BYTES = 256
MAX_LAYERS = 1024
MAX_BLOCK_BYTES = 1 << 30


class Geometry(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The shape of one block: `block_size` tokens of K and V over all layers of one rank.

    `k_dim` and `v_dim` are per head and may differ; `v_dim = 0` is a latent form (MLA), whose one vector
    per token is stored as K with one head. Raises ValueError naming the field when a value is out of range.
    Sizes are kept once computed (`dict=True` is for that): copies ask for them block by block.
    """

    block_size: int
    layers: int
    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str = "bf16"
    layout: str = "nhd"

    def __post_init__(self) -> None:
        for name, low, high in (
            ("block_size", 1, 65536),
            ("layers", 1, MAX_LAYERS),
            ("kv_heads", 1, 4096),
            ("k_dim", 1, 65536),
            ("v_dim", 0, 65536),
        ):
            value = getattr(self, name)
            if type(value) is not int:  # 16.0 equals 16, but would encode as another namespace
                raise ValueError(f"{name} is {value!r}; an integer is wanted")
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; it must be in {low}..{high}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        self._check_layout()
        if self.slot_bytes > MAX_BLOCK_BYTES:
            raise ValueError(f"a block of {self.slot_bytes} bytes is over the limit of {MAX_BLOCK_BYTES}")

    def _check_layout(self) -> None:
        named = self.layout.startswith("opaque:") and self.layout != "opaque:"
        if self.layout not in LAYOUTS and not named:
            raise ValueError(f"layout {self.layout!r} is not one of {', '.join(LAYOUTS)}, opaque:NAME")
        if (size := len(self.layout.encode())) > MAX_LAYOUT_BYTES:
            raise ValueError(f"layout has {size} bytes; the limit is {MAX_LAYOUT_BYTES}")

    @functools.cached_property
    def k_bytes(self) -> int:
        """Bytes of K of one layer."""
        return self.block_size * self.kv_heads * self.k_dim * DTYPE_BYTES[self.dtype]

    @functools.cached_property
    def v_bytes(self) -> int:
        """Bytes of V of one layer; V follows K."""
        return self.block_size * self.kv_heads * self.v_dim * DTYPE_BYTES[self.dtype]

    @functools.cached_property
    def layer_bytes(self) -> int:
        """Bytes of one layer's part, K and V."""
        return self.k_bytes + self.v_bytes

    @functools.cached_property
    def layer_stride(self) -> int:
        """Distance between layer parts in a slot and on disk: `layer_bytes` padded to 4 KiB."""
        return align_up(self.layer_bytes, PAGE_BYTES)

    @functools.cached_property
    def block_bytes(self) -> int:
        """Payload of a block without padding: what crosses the wire."""
        return self.layers * self.layer_bytes

    @functools.cached_property
    def slot_bytes(self) -> int:
        """What a block takes in a slot and on disk: every layer part padded to 4 KiB."""
        return self.layers * self.layer_stride
