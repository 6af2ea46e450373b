"""What an OffloadedCache has in this process: for each layer the KV of the columns from `first` on, and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import CacheLayerMixin

from kvtierd.connectors.cache_tensors import TORCH_DTYPES, carried
from kvtierd.connectors.kv_layout import LayerKv
from kvtierd.connectors.offloaded_attention import ATTRIBUTE, Mask
from kvtierd.connectors.offloaded_table import BlockTable, Numbers
from kvtierd.core.geometry import Geometry


class Owner(Protocol):
    """What a layer wants of its cache."""

    def handing_out(self, index: int, rows: int) -> None:
        """A layer is about to hand out its keys, with new ones of so many rows."""
        ...

    def attend(
        self, index: int, query: Any, key: Any, value: Any, mask: Mask, scale: float, positions: Any
    ) -> torch.Tensor:
        """Attention over the past and these keys."""
        ...


class OffloadedLayer(CacheLayerMixin):
    """One layer: `keys` and `values` are [rows, kv_heads, columns from `first` on, dim]."""

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, owner: Owner, index: int) -> None:
        super().__init__()
        self._owner = owner
        self.index = index
        self.first = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take dtype, device and shape from the first tokens."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Have these, [rows, kv_heads, tokens, dim]; they are never written in place."""
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, and hand out what is here; the keys name this layer, which is how attention finds the past."""
        self._owner.handing_out(self.index, key_states.shape[0])
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        handed_out = self.keys[:]
        setattr(handed_out, ATTRIBUTE, self)
        return handed_out, self.values

    def attend(self, query: Any, key: Any, value: Any, mask: Mask, scale: float, positions: Any = None) -> torch.Tensor:
        """Attention over the past and what was handed out."""
        return self._owner.attend(self.index, query, key, value, mask, scale, positions)

    @property
    def columns(self) -> int:
        """How many columns are here."""
        return int(self.keys.shape[-2]) if self.keys is not None else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and first column of what `update` will hand out."""
        return self.columns + query_length, self.first

    def get_seq_length(self) -> int:
        """Tokens, those in the daemon too."""
        return self.first + self.columns

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def keep(self, columns: slice) -> None:
        """Keep some of the columns; the others' memory is given back."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :, columns].clone(), self.values[:, :, columns].clone()


class Spill(NamedTuple):
    """So many blocks of a row are to go; `like` is a row before it that has the same ones."""

    row: int
    blocks: int
    like: int | None


class Tails:
    """All layers together. `first` is the first column that is here, `seen` how many columns there are in all."""

    def __init__(self, layers: Sequence[OffloadedLayer], block_size: int, tail_tokens: int) -> None:
        self._layers = layers
        self.block_size = block_size
        self.tail_tokens = tail_tokens
        self.first = 0
        self.seen = 0

    @property
    def are_level(self) -> bool:
        """Whether all layers hold what they did when the last forward pass ended."""
        return all(layer.get_seq_length() == self.seen for layer in self._layers)

    def end_step(self) -> None:
        """A forward pass has gone through all layers."""
        self.seen = self._layers[0].get_seq_length()

    def roll_back(self) -> None:
        """Forget what came since the last forward pass ended."""
        self._keep(self.first, self.seen)

    def geometry(self) -> Geometry:
        """Shape of blocks. Raises ValueError where layers differ, or their dtype is not stored."""
        shapes = {(x.keys.shape[1], x.keys.shape[3], x.values.shape[3], x.dtype) for x in self._layers}
        if len(shapes) != 1:
            raise ValueError(f"layers differ, which one block cannot hold: (heads, K dim, V dim, dtype) {shapes}")
        heads, k_dim, v_dim, dtype = shapes.pop()
        names = [name for name, known in TORCH_DTYPES.items() if known == dtype]
        if not names:
            raise ValueError(f"KV of dtype {dtype} is not stored; {', '.join(TORCH_DTYPES)} are")
        return Geometry(
            block_size=self.block_size,
            layers=len(self._layers),
            kv_heads=heads,
            k_dim=k_dim,
            v_dim=v_dim,
            dtype=names[0],
        )

    def plan_spill(self, table: BlockTable, pads: Numbers) -> list[Spill]:
        """Which whole blocks are old enough; those that rows have in common go once."""
        begins = pads + table.counts * self.block_size
        ready = np.maximum(0, (self.seen - self.tail_tokens - begins) // self.block_size)
        plan: list[Spill] = []
        for row in np.flatnonzero(ready).tolist():
            count = int(ready[row])
            like, same = self._like(row, count, [item.row for item in plan], begins, table)
            if same:
                plan.append(Spill(row, same, like))
            if same < count:
                plan.append(Spill(row, count - same, None))
        return plan

    def _like(
        self, row: int, count: int, others: Sequence[int], begins: Numbers, table: BlockTable
    ) -> tuple[int | None, int]:
        """A row with the same past whose next blocks are the same, byte for byte, and how many of them."""
        for other in dict.fromkeys(others):
            if (
                begins[other] == begins[row]
                and table.counts[row] == table.counts[other]
                and table.same_past(row, other)
            ):
                same = 0
                while same < count and self._equal(row, other, int(begins[row]) + same * self.block_size):
                    same += 1
                if same:
                    return other, same
        return None, 0

    def _equal(self, row: int, other: int, column: int) -> bool:
        columns = slice(column - self.first, column - self.first + self.block_size)
        return all(
            torch.equal(part[row, :, columns], part[other, :, columns])
            for layer in self._layers
            for part in (layer.keys, layer.values)
        )

    def arrays(self, row: int, column: int) -> list[LayerKv]:
        """The KV of a block that begins at a column of a row, as views."""
        part = slice(column - self.first, column - self.first + self.block_size)
        return [
            LayerKv(carried(layer.keys[row, :, part]), carried(layer.values[row, :, part])) for layer in self._layers
        ]

    def drop_before(self, column: int) -> None:
        """What lies before a column is in the daemon for all rows."""
        self._keep(column, self.seen)

    def select(self, rows: torch.Tensor) -> None:
        """Make the rows these."""
        for layer in self._layers:
            if layer.keys is not None and layer.values is not None:
                index = rows.to(layer.keys.device)
                layer.keys, layer.values = layer.keys.index_select(0, index), layer.values.index_select(0, index)

    def crop(self, left: int, pieces: Mapping[int, tuple[int, Sequence[LayerKv]]]) -> None:
        """Leave `left` columns. `pieces` are blocks that rows have again here, and the column where each begins."""
        first = min([self.first, left, *(begin for begin, _ in pieces.values())])
        for layer in self._layers:
            layer.keys, layer.values = (
                self._cropped(
                    part, left, first, {row: (at, kv[layer.index][which]) for row, (at, kv) in pieces.items()}
                )
                for which, part in enumerate((layer.keys, layer.values))
            )
            layer.first = first
        self.first, self.seen = first, left

    def _cropped(
        self, part: torch.Tensor, left: int, first: int, pieces: Mapping[int, tuple[int, npt.NDArray[Any]]]
    ) -> torch.Tensor:
        rows, heads, _, dim = part.shape
        made = part.new_zeros((rows, heads, left - first, dim))
        if left > self.first:
            made[:, :, self.first - first :] = part[:, :, : left - self.first]
        for row, (begin, block) in pieces.items():
            tokens = torch.from_numpy(np.ascontiguousarray(block[:, : left - begin]).view(f"i{block.itemsize}"))
            made[row, :, begin - first : begin - first + tokens.shape[1]] = tokens.view(part.dtype).to(part.device)
        return made

    def reset(self) -> None:
        """Forget everything."""
        for layer in self._layers:
            layer.keys = layer.values = None
            layer.is_initialized = False
            layer.first = 0
        self.first = self.seen = 0

    def _keep(self, first: int, end: int) -> None:
        columns = slice(first - self.first, end - self.first)
        for layer in self._layers:
            if layer.first != first or layer.get_seq_length() != end:
                layer.keep(columns)
                layer.first = first
        self.first = first


def as_queries(query: torch.Tensor) -> npt.NDArray[Any]:
    """[rows, heads, queries, dim] as [rows, queries, heads, dim] for a request; bf16 is uint16."""
    ordered = query.detach().to("cpu").transpose(1, 2).contiguous()
    if ordered.dtype == torch.bfloat16:
        ordered = ordered.view(torch.int16)
    array: npt.NDArray[Any] = ordered.numpy()
    return array.view(np.uint16) if query.dtype == torch.bfloat16 else array
