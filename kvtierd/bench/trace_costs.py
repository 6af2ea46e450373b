"""What the decisions cost: time of each policy function on one batch, by block. No reference, no goal: figures to know.

Batches are prompts of 64 blocks; state is as large as a tier of 30,000 blocks makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvtierd.bench.options import Options
from kvtierd.bench.rounds import alternate, timed
from kvtierd.bench.rows import Row, make_row
from kvtierd.bench.trace_replay import SEED
from kvtierd.policy.admission import Budgeted, SecondAccess
from kvtierd.policy.advice import advise
from kvtierd.policy.ghosts import GhostHits
from kvtierd.policy.heat import heat_of, touch_heat
from kvtierd.policy.key_filter import KeyFilter
from kvtierd.policy.return_eviction import ReturnEviction
from kvtierd.policy.returns import ReturnModel
from kvtierd.policy.thrash import ThrashGuard

BLOCKS = 30_000
PROMPT = 64
PROMPTS = 200
HALF_LIFE_S = 3600.0


def cost_rows(options: Options) -> Iterator[Row]:
    """Time every function."""
    works = _works()
    figures = alternate(
        [lambda work=work: timed(work) for work in works.values()],  # type: ignore[misc]
        options.rounds(5, 3),
    )
    for name, seconds in zip(works, figures, strict=True):
        yield make_row("trace", f"cost of {name}", seconds / (PROMPTS * PROMPT) * 1e9, "ns a block")


def _works() -> dict[str, Callable[[], object]]:
    rng = np.random.default_rng(SEED)
    blocks = rng.integers(0, 2 * BLOCKS // PROMPT, PROMPTS)[:, None] * PROMPT + np.arange(PROMPT)
    prompts = rng.integers(0, 1 << 64, 2 * BLOCKS + PROMPT, np.uint64)[blocks]
    rows = blocks.astype(np.int32)
    heat, since_s = np.zeros(blocks.max() + 1, np.uint16), np.zeros(blocks.max() + 1, np.uint32)
    model = ReturnModel(BLOCKS, SEED)
    policy = ReturnEviction(int(blocks.max()) + 1, model, 1)
    usage = model.observe(prompts[0], 0, 0)
    ghosts, guard = GhostHits(BLOCKS, SEED), ThrashGuard(BLOCKS, SEED)
    admission, seen = Budgeted(SecondAccess(), 1 << 50, 0), KeyFilter(16 * BLOCKS, SEED)
    there = np.zeros(PROMPT, np.bool_)
    fetch_s = np.full(PROMPT, 1e-3)
    holds = np.zeros(int(blocks.max()) + 1, np.int32)

    def each(step: Callable[[int], object]) -> Callable[[], object]:
        return lambda: [step(i) for i in range(PROMPTS)]

    def evict(_: int) -> None:
        victims = policy.victims(0, holds, PROMPT, 4096)
        policy.removed(0, victims)
        policy.used(0, victims, usage)

    return {
        "observing a request": each(lambda i: model.observe(prompts[i], PROMPT, i << 30)),
        "using its slots": each(lambda i: policy.used(0, rows[i], usage)),
        "evicting and filling": each(evict),
        "heat, touched": each(lambda i: touch_heat(heat, since_s, rows[i], i, HALF_LIFE_S)),
        "heat, read": each(lambda i: heat_of(heat, since_s, rows[i], i, HALF_LIFE_S)),
        "admission": each(lambda i: admission.admit(seen.add(prompts[i]), there, 1, i)),
        "ghost hits": each(lambda i: ghosts.accessed(prompts[i])),
        "thrash guard": each(lambda i: guard.wanted(prompts[i], i)),
        "load or recompute": each(lambda _: advise(fetch_s, 6e-3)),
    }
