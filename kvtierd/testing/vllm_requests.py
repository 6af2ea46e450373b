"""Stand-ins for vLLM's requests and steps, as far as the connector looks at them: to test it where vLLM is not."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any


@dataclasses.dataclass
class FakeRequest:
    """A vLLM Request of these token ids."""

    request_id: str
    prompt_token_ids: list[int] | None
    all_token_ids: list[int] = dataclasses.field(default_factory=list)
    num_computed_tokens: int = 0
    prompt_embeds: Any = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: list[Any] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt_token_ids or ())

    @property
    def num_tokens(self) -> int:
        """Tokens that are known."""
        return len(self.all_token_ids)


def fake_step(scheduled: dict[str, int], pages: dict[str, list[int]], preempted: set[str] | None = None) -> Any:
    """A SchedulerOutput: tokens scheduled and pages held by request, and requests that were preempted."""
    state = SimpleNamespace(get_block_ids=lambda request_id: (pages[request_id],))
    return SimpleNamespace(num_scheduled_tokens=scheduled, preempted_req_ids=preempted, kv_connector_block_state=state)


def fake_feature(identifier: str, offset: int, length: int) -> Any:
    """A multimodal input of a request."""
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))
