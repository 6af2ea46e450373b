"""The scheduler's side of the vLLM connector: what to look up, to load and to save, request by request.

Lookups run in a thread, and are awaited for a few milliseconds at most; everything else is told to the workers with the
engine's next step.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvtierd.connectors.vllm_adapters import Adapters
from kvtierd.connectors.vllm_announcements import Announcements
from kvtierd.connectors.vllm_keys import features_of
from kvtierd.connectors.vllm_lookups import Found, Lookup, Lookups, Question
from kvtierd.connectors.vllm_plan import Plan, Transfer

_log = logging.getLogger("vllm.kvtierd")


@dataclasses.dataclass(slots=True)
class _Tracked:
    """What is known of a request that may be cached."""

    request: Any
    lookup: Lookup
    found: Found | None = None
    computed: int = 0
    """Leading blocks that the engine had itself when it asked for more."""
    saved: int = 0
    """Leading blocks that are stored, or whose saving was planned."""
    loading: tuple[int, ...] = ()
    """Pages that are being loaded, the first of which is of block `computed`."""
    saving: bool = False
    """Whether workers may still read its pages."""
    may_load: bool = True
    may_save: bool = True


class SchedulerSide:
    """Not thread-safe: vLLM calls it from its scheduler. `block_size` is in tokens."""

    def __init__(
        self, lookups: Lookups, adapters: Adapters, block_size: int, announcements: Announcements | None = None
    ) -> None:
        self._lookups = lookups
        self._announcements = announcements
        self._adapters = adapters
        self._block_size = block_size
        self._tracked: dict[str, _Tracked] = {}
        self._plan = Plan()

    def add(self, request: Any) -> None:
        """A request came: begin to look it up while it waits for its turn."""
        if cacheable(request):
            self._tracked[request.request_id] = _Tracked(request, self._begin(request, request.prompt_token_ids))

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens behind the first `computed` ones can be loaded, and that this happens between steps.

        Waits a moment for an answer that is about to come; (None, False) where it does not: the engine asks again.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not tracked.may_load or request.skip_reading_prefix_cache:
            return 0, False
        tracked.lookup.wait()
        if tracked.lookup.pending:
            return None, False
        found = self._found(tracked)
        # At least one token is left to compute: the engine needs its logits.
        usable = min(found.blocks, (request.num_tokens - 1) // self._block_size) if found else 0
        tracked.computed = computed // self._block_size
        if usable <= tracked.computed:
            return 0, False
        return (usable - tracked.computed) * self._block_size, True

    def allocated(self, request: Any, pages: list[int], tokens: int) -> None:
        """The engine gave a request its pages and wants `tokens` tokens loaded, as many as `matched` said, or none."""
        tracked = self._tracked.get(request.request_id)
        if not tokens or tracked is None:
            return
        end = tracked.computed + tokens // self._block_size
        tracked.loading = tuple(pages[tracked.computed : end])
        tracked.may_load = False
        self._plan.loads.append(_transfer(tracked, tracked.computed, end, tracked.loading))

    def plan(self, step: Any) -> Plan:
        """What the workers do beside this step (a vLLM SchedulerOutput), and reset."""
        for request_id in step.preempted_req_ids or ():
            self._preempt(request_id)
        for request_id, scheduled in step.num_scheduled_tokens.items():
            if request_id in self._tracked:
                self._save(self._tracked[request_id], scheduled, step.kv_connector_block_state)
        plan, self._plan = self._plan, Plan()
        plan.idle = not step.num_scheduled_tokens
        return plan

    def received(self, request_ids: Iterable[str], failed_pages: set[int]) -> None:
        """Loads have ended; what could not be loaded is computed by the engine, and then stored again."""
        if failed_pages:
            for tracked in self._tracked.values():
                whole = _leading(tracked.loading, failed_pages)
                if whole < len(tracked.loading):
                    tracked.saved = min(tracked.saved, tracked.computed + whole)
        for request_id in request_ids:
            if request_id in self._tracked:
                self._tracked[request_id].loading = ()

    def saved(self, saves: Mapping[int, Sequence[int]]) -> None:
        """Saves have ended on some ranks; see `Announcements.ended`."""
        if self._announcements is not None:
            self._announcements.ended(saves)

    def take_events(self) -> list[Any]:
        """vLLM's KV events of blocks that the daemon has, or has no longer, since the last call."""
        return self._announcements.take() if self._announcements is not None else []

    def finished(self, request: Any) -> bool:
        """A request has ended; True where the engine must keep its pages until the workers say that they are read."""
        tracked = self._tracked.pop(request.request_id, None)
        # Pages that are being loaded are kept by the engine anyway, and given back once, when the load has ended.
        if tracked is None or not tracked.saving or tracked.loading:
            return False
        self._plan.finished.add(request.request_id)
        return True

    def reset(self) -> None:
        """The weights were changed in place: requests that wait are looked up anew, and those that have begun are not
        cached any further, since their KV is of both."""
        self._adapters.renew()
        if self._announcements is not None:
            self._announcements.reset()
        for tracked in self._tracked.values():
            if tracked.request.num_computed_tokens:
                tracked.may_load = tracked.may_save = False
            else:
                tracked.found, tracked.saved = None, 0
                tracked.lookup = self._begin(tracked.request, tracked.request.prompt_token_ids)

    def close(self) -> None:
        """End the thread of the lookups."""
        self._lookups.close()

    def _begin(self, request: Any, tokens: list[int]) -> Lookup:
        question = Question(
            facts=functools.partial(self._adapters.facts, request.lora_request),
            tokens=tokens,
            blocks=len(tokens) // self._block_size,
            salt=request.cache_salt,
            features=features_of(request),
        )
        return self._lookups.begin(question)

    def _found(self, tracked: _Tracked) -> Found | None:
        """The lookup's answer, noted when it comes: what is stored needs no saving."""
        if tracked.found is None and (found := tracked.lookup.found()) is not None:
            tracked.found = found
            tracked.saved = found.blocks
            if self._announcements is not None and found.blocks:
                self._announcements.found(tracked.request, found.keys.keys(0, found.blocks))
        return tracked.found

    def _preempt(self, request_id: str) -> None:
        """Its pages are taken away, and it will start over: what was stored meanwhile is looked up anew."""
        self._plan.preempted.add(request_id)
        if tracked := self._tracked.get(request_id):
            tracked.found, tracked.saved, tracked.saving = None, 0, False
            tracked.may_load = tracked.may_save = True
            tracked.lookup = self._begin(tracked.request, list(tracked.request.all_token_ids))

    def _save(self, tracked: _Tracked, scheduled: int, state: Any) -> None:
        """Plan to save the blocks that this step completes. Tokens that are not known yet (drafts, and those of steps
        under way) have no keys; their blocks follow with a later step."""
        found, request = self._found(tracked), tracked.request
        whole = min(request.num_computed_tokens + scheduled, request.num_tokens) // self._block_size
        if found is None or whole <= tracked.saved or not tracked.may_save:
            return
        try:
            found.keys.grow(request.all_token_ids, whole)
        except ValueError:
            _log.exception("kvtierd: request %s is not cached any further", request.request_id)
            tracked.may_save = False
            return
        pages = tuple(state.get_block_ids(request.request_id)[0][tracked.saved : whole])
        number = 0
        if self._announcements is not None:
            number = self._announcements.plan(request, tracked.saved, whole, found.keys.keys(tracked.saved, whole))
        self._plan.saves.append(_transfer(tracked, tracked.saved, whole, pages, number))
        tracked.saved, tracked.saving = whole, True


def cacheable(request: Any) -> bool:
    """Whether token ids, multimodal hashes and salts tell all that shapes a vLLM request's KV: not for prompts given as
    embeddings, nor for those that are still being written."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None and not request.resumable


def _transfer(tracked: _Tracked, begin: int, end: int, pages: tuple[int, ...], number: int = 0) -> Transfer:
    found = tracked.found
    assert found is not None, "keys come with the lookup's answer"
    return Transfer(
        request_id=tracked.request.request_id,
        facts=found.facts,
        keys=found.keys.keys(begin, end),
        parents=found.keys.parents(begin),
        pages=pages,
        number=number,
    )


def _leading(pages: tuple[int, ...], failed: set[int]) -> int:
    """How many pages come before the first that failed."""
    return next((i for i, page in enumerate(pages) if page in failed), len(pages))
