"""Verify: every byte that comes back is compared where it lies in the arena, against the generator."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtierd.core.errors import KvtierdError
from kvtierd.core.keys import Keys
from kvtierd.protocol.messages import TIER_GPU, TIER_HOST, TIER_NVME
from kvtierd.stress.content import BlockId

if TYPE_CHECKING:
    from kvtierd.protocol.holds import Lease
    from kvtierd.stress.worker import Tools

TRIES = 60
"""For a block that does not come: reads are cut short where too many are on their way, or the daemon starts again."""
PAUSE_S = 0.05
GIVE_UP = 64
"""So many missing blocks of a job, and nobody waits long for further ones."""
FINDINGS_MAX = 20
"""Told of each job; all are counted."""


@dataclasses.dataclass(slots=True)
class Checked:
    """What was compared, and what was found wrong."""

    blocks: int = 0
    lossy: int = 0
    missing: int = 0
    wrong: int = 0
    sources: Counter[str] = dataclasses.field(default_factory=Counter)
    findings: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def note(self, finding: str) -> None:
        """Keep the words of the first few."""
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(finding)

    def result(self) -> dict[str, Any]:
        """As JSON has it."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return found | {"sources": dict(self.sources)}


def verify(tools: Tools, command: Mapping[str, Any]) -> dict[str, Any]:
    """Compare blocks of the context: `blocks` by number, in any order, or all from `begin` to `end` in theirs."""
    numbers = command.get("blocks") or range(command["begin"], command["end"])
    checked = Checked()
    names = [BlockId(0, number) for number in numbers]
    check(tools, tools.keys[np.asarray(numbers, np.int64)], names, checked, command["batch"])
    return checked.result()


def verify_prompts(tools: Tools, command: Mapping[str, Any]) -> dict[str, Any]:
    """Compare whole prompts, each a list of (stream, blocks): all of their blocks must be there."""
    checked = Checked()
    for prompt in command["prompts"]:
        runs = [tuple(run) for run in prompt]
        check(tools, tools.content.keys(*runs), tools.content.ids(*runs), checked, command["batch"])
    return checked.result()


def check(tools: Tools, keys: Keys, names: Sequence[BlockId], checked: Checked, batch: int) -> None:
    """Compare all of these blocks; one that does not come after many tries is missing."""
    begin_s, at, tries = time.perf_counter(), 0, 0
    while at < len(names):
        done = _run(tools, keys[at:], names[at:], checked, batch)
        at += done
        tries = 0 if done else tries + 1
        tools.tell(progress=0)
        if at < len(names) and tries >= (TRIES if checked.missing < GIVE_UP else 2):
            checked.missing += 1
            checked.note(f"block {names[at].index} of stream {names[at].stream} is missing")
            at, tries = at + 1, 0
        elif at < len(names) and tries:
            time.sleep(PAUSE_S)
    checked.seconds += time.perf_counter() - begin_s


def _run(tools: Tools, keys: Keys, names: Sequence[BlockId], checked: Checked, batch: int) -> int:
    """Compare the leading run of present blocks; how many there were."""
    at = 0
    try:
        for lease in tools.client.leases(tools.handle, keys, batch=batch):
            good = check_lease(tools, lease, names[at : at + lease.count], checked)
            at += good
            tools.tell(progress=good)
            if good < lease.count:
                break
    except KvtierdError as error:
        checked.sources[f"refused: {type(error).__name__}"] += 1
    return at


def check_lease(tools: Tools, lease: Lease, names: Sequence[BlockId], checked: Checked) -> int:
    """Compare what is leased, in place; how many leading blocks did not change hands meanwhile."""
    codecs = lease.codecs if lease.codecs.size else np.zeros(lease.count, np.uint8)
    found = [
        tools.content.wrong_elements(name, view, int(codec))
        for name, view, codec in zip(names, lease.views, codecs, strict=True)
    ]
    good = lease.unchanged()
    for name, wrong, codec, source in zip(names[:good], found, codecs, lease.sources, strict=False):
        checked.blocks += 1
        checked.lossy += int(codec != 0)
        checked.sources[_source(int(source))] += 1
        if wrong:
            checked.wrong += 1
            text = ", ".join(f"{count} elements of layer {layer}" for layer, count in wrong.items())
            checked.note(f"block {name.index} of stream {name.stream} is wrong: {text}")
    return good


def _source(mask: int) -> str:
    """The fastest tier of a residency mask."""
    for bit, tier in ((TIER_HOST, "host"), (TIER_GPU, "gpu"), (TIER_NVME, "nvme")):
        if mask & bit:
            return tier
    return "nowhere"


def hot(tools: Tools, command: Mapping[str, Any]) -> dict[str, float]:
    """Copy blocks that are in host to memory of one's own, `rounds` times after one that brings them there."""
    begin, end, batch = command["begin"], command["end"], command["batch"]
    out = np.zeros((batch, tools.content.geometry.block_bytes), np.uint8)
    copied, begin_s = 0, time.perf_counter()
    for turn in range(command["rounds"] + 1):
        if turn == 1:
            copied, begin_s = 0, time.perf_counter()
        for lease in tools.client.leases(tools.handle, tools.keys[begin:end], batch=batch):
            copied += lease.copy_to(out, verify=False) * out.shape[1]
    return {"bytes": copied, "seconds": time.perf_counter() - begin_s}
