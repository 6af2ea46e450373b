"""SGLang's host pools as objects: a page of a pool is one object, whose pieces lie where the pool says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import blake3
import numpy as np

from kvtierd.connectors.opaque import opaque_geometry
from kvtierd.connectors.pieces import Pieces, memory_at
from kvtierd.core.keys import KEY_BYTES, Keys
from kvtierd.core.namespace import Namespace
from kvtierd.protocol.results import NamespaceHandle

RANKED_POOLS = ("mamba",)
"""Pools that are cut by tensor-parallel ranks also where the model's latent KV is not."""


class Pool:
    """One of SGLang's host pools, or its flat pages (`flat`), and the namespace of its pages.

    `handle` is None for a pool that holds no bytes: an anchor that only numbers the pages of others.
    """

    def __init__(self, config: Any, name: str, pool: Any, *, revision: str, salt: str, flat: bool = False) -> None:
        self._pool = pool
        self._page_size = int(getattr(pool, "page_size", 1) or 1)
        sizes = self._sizes(flat=flat)
        shape = "flat" if flat else str(getattr(pool, "layout", ""))
        cut = blake3.blake3(repr(sizes).encode()).hexdigest()[:16]
        self.nbytes = sum(sizes)
        self.handle = None
        if sizes:
            form = f"{name}|{shape}|{self._page_size}|{getattr(pool, 'dtype', '')}|{cut}"
            self.handle = NamespaceHandle(_namespace(config, name, form, self.nbytes, revision, salt), allow_loss=False)

    def _sizes(self, *, flat: bool) -> list[int]:
        """Bytes of the pieces of one page."""
        if flat:
            page = self._pool.get_dummy_flat_data_page()
            return [page.numel() * page.element_size()]
        import torch

        meta = self._pool.get_page_buffer_meta(torch.arange(self._page_size))
        return [] if meta is None else [int(size) for size in meta[1]]

    def pages(self, count: int, indices: Any) -> list[Pieces]:
        """Where `count` pages lie whose tokens have these indices ([count * page_size]).

        Raises ValueError where the numbers do not fit.
        """
        if indices is None or len(indices) != count * self._page_size:
            given = "none" if indices is None else len(indices)
            raise ValueError(f"{count} pages of {self._page_size} tokens came with {given} indices")
        pointers, sizes = self._pool.get_page_buffer_meta(indices)
        if len(pointers) % count or len(sizes) != len(pointers):
            raise ValueError(f"{count} pages came in {len(pointers)} pieces with {len(sizes)} sizes")
        each = len(pointers) // count
        places = [memory_at(int(at), int(size)) for at, size in zip(pointers, sizes, strict=True)]
        return [places[i * each : (i + 1) * each] for i in range(count)]

    def keys(self, hashes: Sequence[str]) -> Keys:
        """[n, 32] uint8 from SGLang's page hashes, which never enter raw."""
        out = np.empty((len(hashes), KEY_BYTES), np.uint8)
        if self.handle is not None:
            for i, page in enumerate(hashes):
                out[i] = np.frombuffer(blake3.blake3(self.handle.digest + page.encode()).digest(), np.uint8)
        return out


def _namespace(config: Any, name: str, form: str, nbytes: int, revision: str, salt: str) -> Namespace:
    """Everything that SGLang tells of a page, beside its hash."""
    ranked = not config.is_mla_model or name in RANKED_POOLS
    dcp = (getattr(config, "dcp_rank", 0), getattr(config, "dcp_size", 1), getattr(config, "logical_page_size", None))
    split = (getattr(config, "tp_lcm_size", None), getattr(config, "should_split_heads", False))
    return Namespace(
        model=config.model_name or "unnamed",
        revision=revision,
        tenant_salt=salt,
        quantisation=f"{form}|cp{config.attn_cp_rank}/{config.attn_cp_size}|dcp{dcp}|split{split}",
        tp_rank=config.tp_rank if ranked else 0,
        tp_size=config.tp_size if ranked else 1,
        pp_rank=config.pp_rank,
        pp_size=config.pp_size,
        geometry=opaque_geometry(nbytes, "opaque:sglang"),
    )
