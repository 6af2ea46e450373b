"""What operators ask of blocks, across namespaces and clients: show, pin, evict, purge."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtierd.core.errors import RequestError
from kvtierd.core.keys import KEY_BYTES
from kvtierd.protocol.messages import Pin, Tier, Unpin
from kvtierd.protocol.service import Session
from kvtierd.tiers.admin import Admin
from kvtierd.tiers.blocks import Rows
from kvtierd.tiers.copies import BIT, Copies
from kvtierd.tiers.expiry import Expiry
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.sessions import SessionState, state_of
from kvtierd.tiers.warm_snapshot import Pins

_log = logging.getLogger(__name__)

SHOWN_MAX = 10_000
"""Blocks of one answer."""
BATCH = 1024
"""Blocks that are pinned at once."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which blocks: those that fit everything that is named.

    `namespace` is a model's name or the beginning of a digest in hex, `key` the beginning of a block key in hex.
    """

    tenant: str = ""
    namespace: str = ""
    key: str = ""
    tier: Tier | None = None
    older_than_s: float = 0.0

    def __post_init__(self) -> None:
        try:
            bytes.fromhex(self.key + "0" * (len(self.key) % 2))
        except ValueError:
            raise ValueError(f"key is {self.key!r}; the beginning of a block key in hexadecimal is wanted") from None

    @property
    def is_everything(self) -> bool:
        """Whether nothing is named."""
        return self == Selection()


class Operator:
    """Serves the operators' socket. Everything runs on the loop, piece by piece, so that requests come between."""

    def __init__(self, copies: Copies, admin: Admin, expiry: Expiry) -> None:
        self._copies = copies
        self._admin = admin
        self._expiry = expiry
        self._sessions: dict[str, Session] = {}
        """Who holds the operators' pins, by tenant."""

    async def blocks(self, chosen: Selection, limit: int) -> tuple[list[dict[str, Any]], int]:
        """Describe blocks, at most `limit`; and how many there are in all."""
        found: list[dict[str, Any]] = []
        total = 0
        async for entry, rows in self._pieces(chosen):
            total += rows.size
            room = min(limit, SHOWN_MAX) - len(found)
            found += self._described(entry, rows[: max(0, room)])
        return found, total

    async def pin(self, chosen: Selection) -> int:
        """Hold blocks in host until `unpin` or the daemon's end; how many more are. RequestError over the limit."""
        count = 0
        async for entry, rows in self._pieces(chosen):
            session = self._session(entry.tenant)
            keys = self._copies.blocks.table.key[rows].copy()
            for begin in range(0, len(keys), BATCH):
                request = Pin(id=0, namespace=state_of(session).number_of(entry))
                answer = await self._admin.pin(session, request, [_frame(keys[begin : begin + BATCH])])
                count += answer.reply.count  # type: ignore[union-attr]
        return count

    async def unpin(self, chosen: Selection) -> int:
        """Take back pins of operators; how many."""
        count = 0
        async for entry, rows in self._pieces(chosen):
            session = self._session(entry.tenant)
            request = Unpin(id=0, namespace=state_of(session).number_of(entry))
            answer = self._admin.unpin(session, request, [_frame(self._copies.blocks.table.key[rows].copy())])
            count += answer.reply.count  # type: ignore[union-attr]
        return count

    def pinned(self) -> list[Pins]:
        """What operators have pinned, for the daemon's next life."""
        found: dict[int, list[bytes]] = {}
        for session in self._sessions.values():
            for key, (entry, _) in state_of(session).pins.items():
                found.setdefault(entry.number, []).append(key)
        return [Pins(number, b"".join(keys)) for number, keys in found.items()]

    async def pin_again(self, pins: list[Pins]) -> None:
        """Pin what operators had pinned in the life before, as far as it is there still."""
        for group in pins:
            entry = self._copies.namespaces[group.namespace]
            session, keys = self._session(entry.tenant), np.frombuffer(group.keys, np.uint8).reshape(-1, KEY_BYTES)
            for begin in range(0, len(keys), BATCH):
                request = Pin(id=0, namespace=state_of(session).number_of(entry))
                try:
                    await self._admin.pin(session, request, [_frame(keys[begin : begin + BATCH])])
                except RequestError as error:
                    _log.warning("%d blocks that were pinned are not any more: %s", len(keys) - begin, error)
                    break

    async def evict(self, chosen: Selection, tier: Tier) -> tuple[int, int]:
        """Drop copies in host or gpu of blocks that have another one; how many, and how many stay.

        Those stay that are in use, or have no other copy. ValueError for nvme.
        """
        if tier == "nvme":
            raise ValueError("copies on nvme are not evicted; purge the blocks")
        dropped = kept = 0
        async for entry, rows in self._pieces(dataclasses.replace(chosen, tier=tier)):
            count = self._admin.thin(entry, rows, tier)
            dropped += count
            kept += rows.size - count
        return dropped, kept

    async def purge(self, chosen: Selection) -> int:
        """Forget blocks in every tier; how many. When it returns they cannot come back, whatever happens.

        Raises RequestError when the disk does not take the tombstones.
        """
        count = 0
        async for entry, rows in self._pieces(chosen):
            self._admin.forget(entry, rows)
            count += rows.size
        await self._admin.make_durable()
        return count

    async def _pieces(self, chosen: Selection) -> AsyncIterator[tuple[NamespaceEntry, Rows]]:
        """Rows of the blocks that are chosen, namespace by namespace and piece by piece."""
        for entry in list(self._copies.namespaces.entries):
            if not _fits(entry, chosen):
                continue
            for rows in self._copies.blocks.of_namespace(entry.number):
                mine = rows[self._chosen(rows, chosen)]
                if mine.size:
                    yield entry, mine
                await asyncio.sleep(0)

    def _chosen(self, rows: Rows, chosen: Selection) -> npt.NDArray[np.bool_]:
        keep = np.ones(rows.size, np.bool_)
        if chosen.tier is not None:
            keep &= (self._copies.blocks.residency(rows) & BIT[chosen.tier]) != 0
        if chosen.older_than_s:
            keep &= self._expiry.ages_s(rows) >= chosen.older_than_s
        if chosen.key:
            whole = np.frombuffer(bytes.fromhex(chosen.key[: len(chosen.key) // 2 * 2]), np.uint8)
            keys = self._copies.blocks.table.key[rows]
            keep &= (keys[:, : whole.size] == whole).all(axis=1)
            if len(chosen.key) % 2 and whole.size < keys.shape[1]:
                keep &= keys[:, whole.size] >> 4 == int(chosen.key[-1], 16)
        return keep

    def _described(self, entry: NamespaceEntry, rows: Rows) -> list[dict[str, Any]]:
        table = self._copies.blocks.table
        masks, ages = self._copies.blocks.residency(rows), self._expiry.ages_s(rows)
        return [
            {
                "key": table.key[row].tobytes().hex(),
                "tenant": entry.tenant,
                "model": entry.namespace.model,
                "digest": entry.digest.hex(),
                "tiers": [name for name, bit in BIT.items() if mask & bit],
                "bytes": entry.geometry.slot_bytes,
                "age_s": age,
                "pins": int(table.pins[row]),
            }
            for row, mask, age in zip(rows.tolist(), masks.tolist(), ages.tolist(), strict=True)
        ]

    def _session(self, tenant: str) -> Session:
        known = self._sessions.get(tenant)
        if known is None:
            known = self._sessions[tenant] = Session(0, tenant, "operator", b"", state=SessionState())
        return known


def _fits(entry: NamespaceEntry, chosen: Selection) -> bool:
    if chosen.tenant and entry.tenant != chosen.tenant:
        return False
    named = chosen.namespace
    return not named or entry.namespace.model == named or entry.digest.hex().startswith(named.lower())


def _frame(keys: npt.NDArray[np.uint8]) -> memoryview:
    return memoryview(np.ascontiguousarray(keys).reshape(-1).view(np.uint8).data)
