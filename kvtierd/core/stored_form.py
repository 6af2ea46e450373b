"""Codecs, and what the FP8 form of a block looks like: the one place that knows where codes, scales and errors lie.

The same in host, on nvme and in the kernels; storage/FORMAT.md §4.1 is normative. A block in FP8 is a row of layers as
its exact form is, each padded with zeros to 4 KiB:

| part | bytes | what |
|---|---|---|
| K codes | block_size x kv_heads x k_dim | a byte an element, in the order of the elements (layout `nhd` or `hnd`) |
| V codes | block_size x kv_heads x v_dim | the same; none of a latent form |
| zeros | up to the next multiple of 64 | |
| scales | 4 x groups | float32, little-endian: what the codes of a group are multiplied by |
| relative L2 | 4 x groups | float32: the root of the sum of squared errors over the sum of squares |
| largest error | 4 x groups | float32: over the largest magnitude of the group |

A *group* is what shares a scale: (layer, K or V, head). Groups are in the order K head 0 … n - 1, V head 0 … n - 1; a
latent form has K only.

A code is e4m3 as OCP's 8-bit floating point specification names it (sign, 4 bits of exponent with bias 7, 3 of
mantissa; no Inf; 0x7f and 0xff are NaN), which is torch's `float8_e4m3fn`. The scale is the smallest power of two with
which the largest finite magnitude of the group is at most 448, never below 2^-100, and 1 where all are zero. A power
of two, because e4m3 is itself a floating point format: an odd scale buys no precision, only up to one bit of range,
while with this one dividing and multiplying are exact, and V that is decoded and encoded again does not change.
Rounding is to nearest even. Inf becomes the largest code of its sign, NaN stays NaN with its sign; the error of a group
with Inf is Inf, and NaN counts for nothing. A decoded value beyond the range of the dtype is its largest finite one.

Keys are *rotated* before they are encoded (`rotation`). A few channels of real keys are many times larger than the
others, in q as in k, and carry most of a score and so most of what a mantissa of 3 bits loses; spread over n channels
that error shrinks by about the root of n, and costs no byte. With n of 16 (4 where the head dim is no multiple of 16, 1
where of neither, and of a latent form, whose keys are its values too) the vector of a token and head is n rows of
k_dim / n numbers, and row i becomes the sum over j of (-1)^popcount(i & j) x row j, over the root of n: Hadamard's
matrix, which is its own inverse. In float32: each number times 1 / root of n, then for h = n/2, n/4 ... 1 rows a and
a + h become their sum and their difference; rounded to bf16, to nearest even. Errors are those of the rotated numbers,
lengths and products of vectors are kept, and so q, rotated alike, gives the same scores. Of the n numbers that meet, a
NaN makes NaN of all, without a sign, and an Inf leaves nothing of the others.
"""

from __future__ import annotations

import dataclasses
import enum
import functools

from kvtierd.core.geometry import LAYOUTS, Geometry
from kvtierd.core.units import PAGE_BYTES, align_up

SCALE_BYTES = 4
SCALES_ALIGNMENT = 64
ENCODABLE = ("bf16", "fp16", "fp32")
"""KV dtypes that FP8 makes smaller and whose elements we can read."""
ROTATIONS = (16, 4, 1)
"""Numbers of channels that may be spread over one another, the best first: powers of 4, whose roots are exact."""


class Codec(enum.IntEnum):
    """How the bytes of a block are stored: the numbers of storage/FORMAT.md §4 and of protocol/SPEC.md §3."""

    RAW = 0
    FP8_E4M3 = 2
    """1 was the same without rotation, in no release: such blocks on disk are not known and dropped."""


@dataclasses.dataclass(frozen=True)
class EncodedLayout:
    """Sizes and offsets, in bytes, of one layer of a block in FP8. Raises ValueError for a geometry that has none."""

    geometry: Geometry

    def __post_init__(self) -> None:
        if not encodable(self.geometry):
            what = f"dtype {self.geometry.dtype!r}, layout {self.geometry.layout!r}"
            raise ValueError(f"a block of {what} has no FP8 form; it stays as it is")

    @property
    def layers(self) -> int:
        """Layers of the block."""
        return self.geometry.layers

    @property
    def groups(self) -> int:
        """Scales of a layer: one a head of K and one a head of V."""
        return self.geometry.kv_heads * (2 if self.geometry.v_dim else 1)

    @functools.cached_property
    def k_codes(self) -> int:
        """Bytes of K's codes; they begin at 0, and V's behind them."""
        return self.geometry.block_size * self.geometry.kv_heads * self.geometry.k_dim

    @functools.cached_property
    def v_codes(self) -> int:
        """Bytes of V's codes."""
        return self.geometry.block_size * self.geometry.kv_heads * self.geometry.v_dim

    @functools.cached_property
    def scales_offset(self) -> int:
        """Where the scales begin."""
        return align_up(self.k_codes + self.v_codes, SCALES_ALIGNMENT)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a layer's scales; each of the two columns of errors behind them has as many."""
        return SCALE_BYTES * self.groups

    @functools.cached_property
    def errors_offset(self) -> int:
        """Where the relative L2 errors begin; the largest errors are behind them."""
        return self.scales_offset + self.scale_bytes

    @functools.cached_property
    def layer_bytes(self) -> int:
        """Bytes of a layer without padding: what its checksum covers."""
        return self.errors_offset + 2 * self.scale_bytes

    @functools.cached_property
    def layer_stride(self) -> int:
        """Distance of layers: `layer_bytes` padded to 4 KiB."""
        return align_up(self.layer_bytes, PAGE_BYTES)

    @functools.cached_property
    def slot_bytes(self) -> int:
        """What a block in FP8 takes in a slot and on disk."""
        return self.geometry.layers * self.layer_stride


def encodable(geometry: Geometry) -> bool:
    """Whether blocks of this geometry have an FP8 form: not those that are FP8 already, integers, or opaque."""
    return geometry.dtype in ENCODABLE and geometry.layout in LAYOUTS


def rotation(geometry: Geometry) -> int:
    """How many channels of a key are spread over one another; 1 is none."""
    if geometry.v_dim == 0:
        return 1
    return next(n for n in ROTATIONS if geometry.k_dim % n == 0)


Form = Geometry | EncodedLayout
"""What a block measures in some codec: layers, layer_bytes, layer_stride, slot_bytes."""


@functools.lru_cache(maxsize=1024)
def form_of(geometry: Geometry, codec: int) -> Form:
    """What a block of this geometry measures in a codec. Raises ValueError for a codec that is none, or has no form."""
    return geometry if Codec(codec) is Codec.RAW else EncodedLayout(geometry)


@functools.lru_cache(maxsize=1024)
def choose_codec(geometry: Geometry, *, lossy: bool) -> Codec:
    """The codec for cold blocks of a namespace: FP8 where loss is allowed, it has such a form, and that is smaller."""
    if not lossy or not encodable(geometry):
        return Codec.RAW
    return Codec.FP8_E4M3 if EncodedLayout(geometry).slot_bytes < geometry.slot_bytes else Codec.RAW
