"""Lookups beside the scheduler: one thread hashes a request's tokens and asks the daemon how much of them it has."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from typing import Any

from kvtierd.connectors.vllm_keys import Feature, RequestKeys
from kvtierd.connectors.vllm_plan import ModelFacts, RankShape, namespace_of
from kvtierd.core.errors import KvtierdError
from kvtierd.protocol.client import Client
from kvtierd.protocol.messages import TIER_GPU, TIER_HOST
from kvtierd.protocol.results import Hit, NamespaceHandle

_log = logging.getLogger("vllm.kvtierd")

AWAIT_S = 0.003
"""How long after its question a lookup may be awaited by the engine's scheduler. An answer takes one or two
milliseconds and comes while the scheduler is at work; a request without one waits for a whole step more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """What is looked up: the first `blocks` blocks of these tokens. `facts` says for which model, and may take time."""

    facts: Callable[[], ModelFacts]
    tokens: Sequence[int]
    blocks: int
    salt: str | None = None
    features: tuple[Feature, ...] = ()


@dataclasses.dataclass(slots=True)
class Found:
    """`blocks` leading blocks are stored on all ranks; `keys` are the request's from now on."""

    facts: ModelFacts
    keys: RequestKeys
    blocks: int


class Lookup:
    """A lookup under way. Past its deadline it counts as a miss; what it finds afterwards still says where to save."""

    def __init__(self, future: Future[Found | None], deadline_s: float, begun_s: float) -> None:
        self._future = future
        self._deadline_s = deadline_s
        self._await_until_s = min(begun_s + AWAIT_S, deadline_s)

    def wait(self) -> None:
        """Wait for the answer, though not beyond AWAIT_S after the question: requests that came together are awaited
        together, and one that is asked about again later is not awaited any more."""
        left_s = self._await_until_s - time.monotonic()
        if left_s > 0:
            wait_for_futures((self._future,), left_s)

    @property
    def pending(self) -> bool:
        """Whether it is worth asking again: there is no answer, and time is left."""
        return not self._future.done() and time.monotonic() < self._deadline_s

    def found(self) -> Found | None:
        """The answer; None while there is none, and where the request cannot be cached at all."""
        return self._future.result() if self._future.done() and not self._future.cancelled() else None


class Lookups:
    """Asks for all ranks at once, so that they agree. `timeout_s` is from the question on, hashing included."""

    def __init__(self, client: Client, shapes: Sequence[RankShape], timeout_s: float) -> None:
        self._client = client
        self._shapes = tuple(shapes)
        self._timeout_s = timeout_s
        self._handles: dict[ModelFacts, tuple[NamespaceHandle, ...]] = {}
        self._complaints: set[str] = set()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvtierd-lookup")

    def begin(self, question: Question) -> Lookup:
        """Start a lookup; does not wait."""
        begun_s = time.monotonic()
        deadline_s = begun_s + self._timeout_s
        return Lookup(self._pool.submit(self._answer, question, deadline_s), deadline_s, begun_s)

    def introduce(self, facts: ModelFacts) -> None:
        """Register a model's namespaces, so that the first lookup need not."""
        try:
            for handle in self._handles_of(facts):
                self._client.register(handle.namespace)
        except KvtierdError as error:
            self._complain(error)

    def close(self) -> None:
        """End the thread after the lookup that it is at."""
        self._pool.shutdown(cancel_futures=True)

    def _answer(self, question: Question, deadline_s: float) -> Found | None:
        try:
            facts = question.facts()
            handles = self._handles_of(facts)
            digests = [handle.digest for handle in handles]
            size = self._shapes[0].geometry.block_size
            keys = RequestKeys(digests, size, salt=question.salt, features=question.features)
            keys.grow(question.tokens, question.blocks)
            return Found(facts, keys, self._ask(handles, keys, deadline_s) if keys.count else 0)
        except KvtierdError as error:
            self._complain(error)
            return None
        except Exception:  # noqa: BLE001 - see below
            # One request goes uncached, with a reason in the log; the engine must not end for it.
            _log.exception("kvtierd: a lookup failed; its request is not cached")
            return None

    def _ask(self, handles: Sequence[NamespaceHandle], keys: RequestKeys, deadline_s: float) -> int:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return 0
        each = keys.keys(0, keys.count)
        hit = self._client.lookup_group(handles, each, timeout_s=left_s)
        self._prefetch(handles, each, hit)
        return hit.count

    def _prefetch(self, handles: Sequence[NamespaceHandle], keys: Sequence[Any], hit: Hit) -> None:
        """What lies on disk is on its way while the request waits for its turn."""
        if hit.count and not (hit.tiers & (TIER_HOST | TIER_GPU)).all():
            for handle, own in zip(handles, keys, strict=True):
                self._client.prefetch(handle, own[: hit.count], timeout_s=self._timeout_s)

    def _handles_of(self, facts: ModelFacts) -> tuple[NamespaceHandle, ...]:
        if facts not in self._handles:
            names = (namespace_of(facts, shape) for shape in self._shapes)
            self._handles[facts] = tuple(NamespaceHandle(name, allow_loss=False) for name in names)
        return self._handles[facts]

    def _complain(self, error: KvtierdError) -> None:
        """Log what the daemon objects to, once: it will object to every request."""
        if (text := str(error)) not in self._complaints:
            self._complaints.add(text)
            _log.error("kvtierd: the daemon serves no lookups, and nothing is cached: %s", text)
