"""RegisterNamespace: what a session may ask for, and how its blocks lie in a slot."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.protocol import messages as m
from kvtierd.protocol.service import Answer, Session
from kvtierd.storage.interface import BlockStore
from kvtierd.tiers.compress_loss import registered
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.namespaces import TTL_MAX_S
from kvtierd.tiers.sessions import need_frames, state_of
from kvtierd.tiers.write_behind import WriteBehind


class Registration:
    """Serves registrations."""

    def __init__(
        self, copies: Copies, chunk_bytes: int, store: BlockStore | None, write_behind: WriteBehind | None
    ) -> None:
        self._copies = copies
        self._chunk_bytes = chunk_bytes
        self._store = store
        self._write_behind = write_behind

    def register(
        self, session: Session, request: m.RegisterNamespace, frames: Sequence[memoryview]
    ) -> Answer | Awaitable[Answer]:
        """Give a namespace a number in this session; RequestError for blocks that no slot could hold."""
        need_frames(frames, 0)
        shape = request.namespace.geometry
        if request.block_bytes not in {0, shape.block_bytes}:
            raise RequestError(
                ErrorCode.GEOMETRY_MISMATCH,
                f"a block of this geometry has {shape.block_bytes} bytes, not {request.block_bytes}",
            )
        if shape.slot_bytes > self._chunk_bytes:
            raise RequestError(
                ErrorCode.TOO_LARGE,
                f"a block takes {shape.slot_bytes} bytes and a chunk has {self._chunk_bytes}; "
                "raise host.chunk_bytes or lower block_size",
            )
        if not 0 <= request.ttl_s <= TTL_MAX_S:
            raise RequestError(ErrorCode.BAD_ARGUMENT, f"ttl_s is {request.ttl_s}; it must be in 0..{TTL_MAX_S}")
        entry = self._copies.namespaces.register(
            session.tenant, request.namespace, allow_loss=request.allow_loss, ttl_s=request.ttl_s
        )
        if self._store is not None:
            self._store.register(entry.stored_digest, entry.stored)
        reply = m.NamespaceReply(
            id=0,
            namespace=state_of(session).number_of(entry),
            digest=entry.digest,
            block_bytes=shape.block_bytes,
            slot_bytes=shape.slot_bytes,
            layer_stride=shape.layer_stride,
        )
        return registered(self._copies, entry, Answer(reply), self._write_behind)
