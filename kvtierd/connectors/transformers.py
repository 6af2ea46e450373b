"""A prefix store for transformers: a prompt's KV is stored while it is generated from, and restored the next time.

    from kvtierd import Client
    from kvtierd.connectors.transformers import PrefixStore

    store = PrefixStore(Client(), model)
    output = store.generate(input_ids, max_new_tokens=32)   # what model.generate returns

Any process with the same weights finds the blocks again, also after a restart of the daemon. One sequence a call;
what cannot be reused (sliding windows, adapters, padding, beams) is refused by name. The daemon is never a condition:
without it every prefix is a miss, nothing is stored, both are counted, and generation goes on.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

try:
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList
except ImportError as error:
    raise ImportError(
        "kvtierd.connectors.transformers wants torch and transformers: pip install 'kvtierd[transformers]'"
    ) from error

from kvtierd.connectors.cache_tensors import LayerBuffers, check_plain, layer_arrays, token_count
from kvtierd.connectors.generate_arguments import check_generate, check_input_ids
from kvtierd.connectors.model_identity import check_model, empty_cache, identify, weights_stamp
from kvtierd.connectors.offloaded_attention import register_offloaded_attention
from kvtierd.connectors.offloaded_cache import OffloadedCache
from kvtierd.connectors.offloaded_store import OffloadError
from kvtierd.connectors.prefix_io import Counters, PrefixIo, Stored
from kvtierd.core.namespace import Namespace
from kvtierd.protocol.client import Client
from kvtierd.protocol.messages import TIER_GPU, TIER_HOST, Tier

__all__ = [
    "Counters",
    "OffloadError",
    "OffloadedCache",
    "PrefixStore",
    "Restored",
    "Stored",
    "register_offloaded_attention",
]

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """A cache that holds the KV of the first `tokens` tokens of a prompt (0: nothing was found, the cache is empty).

    `sources` counts blocks by the fastest tier they were found in; `payload_bytes` is what was copied.
    """

    cache: Any
    tokens: int = 0
    sources: dict[str, int] = dataclasses.field(default_factory=dict)
    payload_bytes: int = 0


class PrefixStore:
    """Stores and restores prompt prefixes of one model through one client.

    `name` and `revision` name the weights; by default they are the model's own name and a fingerprint of the weights
    as they lie in memory. `tenant_salt` keeps users of one model apart. Raises ValueError for a model whose prefixes
    cannot be reused (see model_identity), and RequestError when the daemon refuses its namespace. Not for several
    threads at once.
    """

    def __init__(
        self,
        client: Client,
        model: Any,
        *,
        name: str | None = None,
        revision: str | None = None,
        tenant_salt: str = "",
        block_size: int = 128,
    ) -> None:
        self.counters = Counters()
        self._client = client
        self._model = model
        self._name, self._revision, self._salt, self._block_size = name, revision, tenant_salt, block_size
        self._identify()

    @property
    def namespace(self) -> Namespace:
        """Everything that must match for this model's KV to be reused."""
        return self._identity.namespace

    def restore(self, input_ids: torch.Tensor) -> Restored:
        """Return the longest stored prefix of a prompt ([1, tokens]) as a cache to pass to `generate` or `forward`.

        At least one token is always left out: a model that is given a past as long as its prompt answers nonsense
        without a word. Every byte is checked against its block's checksums. Raises ValueError for a batch.
        """
        check_input_ids(input_ids)
        self._follow_model()
        self.counters.restores += 1
        cache, shape = empty_cache(self._model), self.namespace.geometry
        keys = self._io.keys(input_ids[0, :-1].cpu().numpy())
        found = self._io.lookup(keys)
        if not len(found):
            return Restored(cache)
        buffers = LayerBuffers(shape, len(found) * shape.block_size)
        blocks = self._io.read(keys, found, buffers.arrays)
        if not blocks:
            return Restored(cache)
        tokens = blocks * shape.block_size
        buffers.fill_cache(cache, tokens, self._identity.devices)
        self.counters.restored_tokens += tokens
        sources = Counter(_found_in(mask) for mask in found[:blocks].tolist())
        return Restored(cache, tokens, dict(sources), blocks * shape.block_bytes)

    def save(self, input_ids: torch.Tensor, cache: Any) -> Stored:
        """Store the whole blocks of `input_ids` ([1, tokens]) that the cache holds and the daemon does not.

        The cache may hold fewer tokens than there are ids (the last one generated has no KV yet). Trouble with the
        daemon is counted, never raised. Raises ValueError for a batch, or a cache that is not this model's.
        """
        check_input_ids(input_ids)
        check_plain(cache)
        self._follow_model()
        keys = self._io.keys(input_ids[0, : token_count(cache)].cpu().numpy())
        return self._io.write(keys, lambda begin, end: layer_arrays(cache, begin, end))

    def generate(self, input_ids: torch.Tensor, **arguments: Any) -> Any:
        """Do what `model.generate(input_ids, **arguments)` does, from the longest stored prefix on; then store.

        The prompt is stored after the first decode step and not after the prefill: the first token waits for nothing,
        and what was prefilled is kept even if the process is killed in the midst of the answer. What was generated
        follows at the end. Raises ValueError naming an argument that the store does not understand.
        """
        config = check_generate(self._model, input_ids, arguments)
        restored = self.restore(input_ids)
        saver = _Saver(self, input_ids, restored.cache)
        if config.prefill_chunk_size is not None:
            self._prefill(input_ids, restored, config.prefill_chunk_size)
            # generate's own chunks start at token 0 whatever the cache holds; what is left for it is one chunk.
            arguments["prefill_chunk_size"] = None
        arguments["logits_processor"] = LogitsProcessorList([*(arguments.get("logits_processor") or ()), saver])
        output = self._model.generate(input_ids, past_key_values=restored.cache, **arguments)
        saver.save()
        return output

    def prefetch(self, input_ids: torch.Tensor, tier: Tier = "host") -> int:
        """Bring a prompt's stored prefix to a tier and wait for it; how many blocks. Raises ValueError for a batch."""
        check_input_ids(input_ids)
        self._follow_model()
        return self._io.prefetch(self._io.keys(input_ids[0].cpu().numpy()), tier)

    def drop(self, tiers: Sequence[Tier]) -> int:
        """Drop this namespace's copies in `tiers` where another remains; how many blocks. Raises Unavailable."""
        return self._io.drop(tiers)

    def _identify(self) -> None:
        self._stamp = weights_stamp(self._model)
        self._identity = identify(
            self._model,
            block_size=self._block_size,
            name=self._name,
            revision=self._revision,
            tenant_salt=self._salt,
        )
        self._io = PrefixIo(self._client, self._identity.namespace, self.counters)

    def _follow_model(self) -> None:
        """Weights that were replaced, cast, moved or written since have another name: their KV is other KV."""
        check_model(self._model)
        if weights_stamp(self._model) != self._stamp:
            self._identify()

    def _prefill(self, input_ids: torch.Tensor, restored: Restored, chunk_size: int) -> None:
        """Compute the prompt in chunks from the restored prefix on, but for the last one."""
        begin, count = restored.tokens, input_ids.shape[1]
        known = inspect.signature(self._model.forward).parameters
        while count - begin > chunk_size:
            chunk = input_ids[:, begin : begin + chunk_size]
            positions = torch.arange(begin, begin + chunk_size, device=input_ids.device).unsqueeze(0)
            options = {"position_ids": positions, "logits_to_keep": 1}
            with torch.no_grad():
                self._model(
                    input_ids=chunk,
                    past_key_values=restored.cache,
                    use_cache=True,
                    **{name: value for name, value in options.items() if name in known},
                )
            begin += chunk_size


class _Saver(LogitsProcessor):
    """Sits in on a generation: remembers its tokens, changes nothing, and saves after the first decode step."""

    def __init__(self, store: PrefixStore, input_ids: torch.Tensor, cache: Any) -> None:
        self._store = store
        self._ids = input_ids
        self._cache = cache
        self._steps = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self._ids = input_ids
        self._steps += 1
        if self._steps == 2:
            self.save()
        return scores

    def save(self) -> None:
        """Store what the cache holds; a cache that cannot be stored is no reason for an answer to be lost."""
        try:
            self._store.save(self._ids, self._cache)
        except ValueError as error:
            self._store.counters.failures += 1
            _log.warning("the prompt's KV is not stored: %s", error)


def _found_in(mask: int) -> str:
    return "host" if mask & TIER_HOST else "gpu" if mask & TIER_GPU else "nvme"
