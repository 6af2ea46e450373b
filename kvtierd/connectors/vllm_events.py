"""vLLM's KV events of what the daemon stored, and of what it has no longer: how they are made, and how workers tell the
scheduler's half."""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from kvtierd.connectors.vllm_announcements import Announcements


@dataclasses.dataclass
class SavesEnded(KVConnectorWorkerMetadata):
    """What workers tell beside a step: by number of a save, how many of its leading blocks each of them stored."""

    saves: dict[int, list[int]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> SavesEnded:
        """The word of several workers."""
        assert isinstance(other, SavesEnded), "one engine has one connector"
        saves = {number: list(counts) for number, counts in self.saves.items()}
        for number, counts in other.saves.items():
            saves.setdefault(number, []).extend(counts)
        return SavesEnded(saves)


def announcements_of(vllm_config: Any, ranks: int, block_size: int) -> Announcements | None:
    """What gathers events of the daemon's blocks; None where vLLM's KV events are off."""
    config = vllm_config.kv_events_config
    if config is None or not config.enable_kv_cache_events:
        return None
    return Announcements(
        ranks, lambda request, begin, end: block_stored(request, begin, end, block_size), blocks_removed
    )


def block_stored(request: Any, begin: int, end: int, block_size: int) -> BlockStored | None:
    """The event of blocks `begin` to `end` - 1 of a vLLM request, with the hashes that vLLM's own events give them, so
    that a router sees one block in two places. None where vLLM has made no hashes of them.

    `block_size` is in tokens, and that of the hashes too, since there is one KV cache group.
    """
    hashes = request.block_hashes
    if len(hashes) < end:
        return None
    lora = request.lora_request
    extra_keys, at = [], 0
    for block in range(begin, end):
        keys, at = generate_block_hash_extra_keys(request, block * block_size, (block + 1) * block_size, at)
        extra_keys.append(keys)
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(each) for each in hashes[begin:end]],
        parent_block_hash=maybe_convert_block_hash(hashes[begin - 1]) if begin else None,
        token_ids=list(request.all_token_ids[begin * block_size : end * block_size]),
        block_size=block_size,
        lora_id=lora.adapter_id if lora is not None else None,
        medium=MEDIUM_CPU,
        lora_name=lora.name if lora is not None else None,
        extra_keys=to_event_extra_keys(extra_keys),
        group_idx=0,
        session_id=request.session_id,
    )


def blocks_removed(hashes: list[Any]) -> BlockRemoved:
    """The event that blocks which such events told of are no longer to be had."""
    return BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU, group_idx=0)
