"""What the scheduler's side of the vLLM connector tells the workers' side, and what these told it at start."""

from __future__ import annotations

import dataclasses

import msgspec

from kvtierd.core.geometry import Geometry
from kvtierd.core.keys import Keys
from kvtierd.core.namespace import Namespace


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a namespace that all ranks share; the fields are those of Namespace."""

    model: str
    revision: str
    tenant_salt: str = ""
    lora: str = ""
    lora_version: str = ""
    rope_digest: str = ""
    quantisation: str = ""


class RankShape(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker holds of every block, from the tensors it was given."""

    geometry: Geometry
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def position(self) -> int:
        """Where this rank's keys stand in a Transfer."""
        return self.pp_rank * self.tp_size + self.tp_rank


def namespace_of(facts: ModelFacts, shape: RankShape) -> Namespace:
    """The namespace of one rank's blocks. Raises ValueError for a text that is too long."""
    ranks = {name: getattr(shape, name) for name in ("tp_rank", "tp_size", "pp_rank", "pp_size")}
    return Namespace(geometry=shape.geometry, **msgspec.structs.asdict(facts), **ranks)


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks of one request to load or to save: the block with key i lies in page `pages[i]` of the engine's cache.

    `keys` and `parents` have one item a rank: [n, 32] uint8, and the key before the first (empty at a prefix's start).
    `number` is a save's, where the scheduler's half wants to hear how it ended; else 0.
    """

    request_id: str
    facts: ModelFacts
    keys: tuple[Keys, ...]
    parents: tuple[bytes, ...]
    pages: tuple[int, ...]
    number: int = 0


@dataclasses.dataclass(slots=True)
class Plan:
    """What the workers do beside one step of the engine.

    `preempted` are requests whose pages are taken away with this step; `finished` are requests that have ended and
    whose pages the engine keeps until the workers say that nothing reads them any more. `idle` says that the step
    computes nothing.
    """

    loads: list[Transfer] = dataclasses.field(default_factory=list)
    saves: list[Transfer] = dataclasses.field(default_factory=list)
    preempted: set[str] = dataclasses.field(default_factory=set)
    finished: set[str] = dataclasses.field(default_factory=set)
    idle: bool = False
