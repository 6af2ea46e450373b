"""Copies between an engine's pages and the daemon, a batch at a time, through one client. No engine in here.

Nothing waits for the daemon beyond the deadlines given; trouble with it is a block that is not loaded, or not stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvtierd.connectors.vllm_pages import Pages
from kvtierd.connectors.vllm_plan import ModelFacts, RankShape, Transfer, namespace_of
from kvtierd.core.units import MIB
from kvtierd.protocol.client import Client
from kvtierd.protocol.holds import Reservation
from kvtierd.protocol.messages import SLOT_BUSY, SLOT_GRANTED
from kvtierd.protocol.results import NamespaceHandle

_log = logging.getLogger("vllm.kvtierd")

BATCH_BYTES = 32 * MIB
"""Bytes leased or reserved at a time: the daemon's deadline holds for one such piece."""


class Saved(NamedTuple):
    """How many blocks a save has stored, and how many of its leading ones are there now, whoever stored them."""

    stored: int
    leading: int


class Transfers:
    """Loads and saves the blocks of one rank. Thread-safe, as the client is."""

    def __init__(
        self, client: Client, shape: RankShape, pages: Pages, *, load_timeout_s: float, save_timeout_s: float
    ) -> None:
        self._client = client
        self._shape = shape
        self._pages = pages
        self._load_timeout_s = load_timeout_s
        self._save_timeout_s = save_timeout_s
        self._batch = max(1, BATCH_BYTES // shape.geometry.slot_bytes)
        self._handles: dict[ModelFacts, NamespaceHandle] = {}

    def fence(self) -> Any:
        """See `Pages.fence`."""
        return self._pages.fence()

    def close(self) -> None:
        """End copying threads, once no load is under way."""
        self._pages.close()

    def load(self, transfer: Transfer, fence: Any = None) -> int:
        """Copy blocks into their pages; how many leading ones arrived whole. Raises KvtierdError."""
        handle, keys = self._handle(transfer), transfer.keys[self._shape.position]
        parent = transfer.parents[self._shape.position]
        done = 0
        leases = self._client.leases(handle, keys, batch=self._batch, parent=parent, timeout_s=self._load_timeout_s)
        for lease in leases:
            pages = transfer.pages[done : done + lease.count]
            good = self._pages.load(pages, lease.views, lease.sums, fence)
            whole = lease.unchanged()
            if good < min(whole, lease.count):
                _log.error("kvtierd: a block does not match its checksum and is deleted; it is computed instead")
                self._client.delete(handle, keys[done + good : done + good + 1])
            done += min(good, whole)
            if min(good, whole) < lease.count:
                break
        return done

    def save(self, transfer: Transfer, cancelled: Callable[[], bool], fence: Any = None) -> Saved:
        """Store blocks from their pages. Raises KvtierdError.

        `cancelled` is asked before each commit: what was copied after pages changed hands is given back.
        """
        handle, keys = self._handle(transfer), transfer.keys[self._shape.position]
        parent = transfer.parents[self._shape.position]
        stored = leading = done = 0
        reservations = self._client.reservations(
            handle, keys, batch=self._batch, parent=parent, timeout_s=self._save_timeout_s
        )
        for slots in reservations:
            count = len(slots.views)
            fresh = self._copy_in(
                slots, transfer.pages[done : done + count], cancelled, fence, wait=transfer.number > 0
            )
            if fresh is None:
                break
            stored += fresh
            # Behind one that was refused none is found.
            if leading == done and fresh == np.count_nonzero(slots.status == SLOT_GRANTED):
                leading += int(np.argmax(np.append(slots.status == SLOT_BUSY, True)))
            done += count
        return Saved(stored, leading)

    def _copy_in(
        self, slots: Reservation, pages: tuple[int, ...], cancelled: Callable[[], bool], fence: Any, *, wait: bool
    ) -> int | None:
        """How many blocks of a reservation are stored now, or, without `wait`, are handed over; None where it is no
        use to go on."""
        granted = [(i, view) for i, view in enumerate(slots.views) if view is not None]
        index = [i for i, _ in granted]
        if cancelled():
            return None
        if not index:
            return 0
        sums = np.empty((len(index), self._shape.geometry.layers), np.uint64)
        self._pages.store([pages[i] for i in index], [view for _, view in granted], sums, fence)
        # What was copied after the pages changed hands is of no use, and they do so only after this was told.
        return None if cancelled() else slots.commit(index, sums=sums, wait=wait)

    def _handle(self, transfer: Transfer) -> NamespaceHandle:
        if transfer.facts not in self._handles:
            namespace = namespace_of(transfer.facts, self._shape)
            self._handles[transfer.facts] = NamespaceHandle(namespace, allow_loss=False)
        return self._handles[transfer.facts]
