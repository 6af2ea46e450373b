"""The vLLM connector with loads that fail: what an engine does then is tested with the real one.

Named by `kv_connector_module_path` in place of the real module. While the file $KVTIERD_TEST_FAULT exists, every load
ends at the second block, and what lies behind it is damaged. Its cache is treated as one on a device.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvtierd.connectors import vllm
from kvtierd.connectors.vllm_pages import Pages
from kvtierd.connectors.vllm_plan import Transfer
from kvtierd.connectors.vllm_transfers import Transfers
from kvtierd.core.checksum import Bytes, Sums, layer_sums
from kvtierd.core.geometry import Geometry


class _Poisoned:
    """Pages that take the complement of each block but the first two, and say so."""

    def __init__(self, pages: Pages, geometry: Geometry) -> None:
        self._pages = pages
        self._geometry = geometry

    def fence(self) -> Any:
        return self._pages.fence()

    def store(self, pages: Sequence[int], slots: Sequence[Bytes], sums: Sums, fence: Any) -> None:
        self._pages.store(pages, slots, sums, fence)

    def load(self, pages: Sequence[int], slots: Sequence[Bytes], sums: Sums, fence: Any) -> int:
        for page, slot in zip(pages[2:], slots[2:], strict=True):
            wrong = ~slot
            self._pages.load([page], [wrong], np.array([layer_sums(wrong, self._geometry)]), fence)
        return self._pages.load(pages[:2], slots[:2], sums[:2], fence)

    def close(self) -> None:
        self._pages.close()


class FaultyTransfers(Transfers):
    """Loads that fail on demand."""

    def load(self, transfer: Transfer, fence: Any = None) -> int:
        """Load into pages that are poisoned while the fault is on."""
        if not Path(os.environ["KVTIERD_TEST_FAULT"]).exists():
            return super().load(transfer, fence)
        real = self._pages
        self._pages = _Poisoned(real, self._shape.geometry)
        try:
            return super().load(transfer, fence)
        finally:
            self._pages = real


class KvtierdConnector(vllm.KvtierdConnector):
    """The connector over such transfers."""

    transfers_type = FaultyTransfers
    staged = True
