"""Mixed load and chaos, and whether what was durable came back."""

from __future__ import annotations

from kvtierd.stress.chaos import Chaos, Load
from kvtierd.stress.processes import StressError
from kvtierd.stress.reading import all_blocks, verify_blocks
from kvtierd.stress.rig import Rig

MIXED_S, QUICK_MIXED_S = 20.0, 5.0
CHAOS_S, QUICK_CHAOS_S = 90.0, 25.0


def mixed(rig: Rig) -> None:
    """Load without disturbance; what it said was durable must be there."""
    seconds = QUICK_MIXED_S if rig.options.quick else MIXED_S
    rig.watch.phase("mixed", int(seconds))
    load = Load(rig.crew, rig.options.load_bytes, rig.watch.at)
    load.run(seconds)
    _take_load(rig, "mixed", load)
    _check_ledger(rig, "ledger", load)


def chaos(rig: Rig) -> None:
    """Load while clients, daemon and disk are disturbed; then all is compared in a daemon that starts after a kill."""
    assert rig.daemon is not None
    seconds = QUICK_CHAOS_S if rig.options.quick else CHAOS_S
    rig.watch.phase("chaos", int(seconds))
    load = Load(rig.crew, rig.options.chaos_bytes, rig.watch.at)
    chaos = Chaos(rig.options.seed, load, rig.daemon, rig.options.clients, rig.folder / "faults.json")
    load.run(seconds, chaos.blows())
    rig.daemon.kill()
    # Clients that ask for nothing do not hear that a daemon has died: they would hold its memory beside the next one's.
    rig.crew.run([{"do": "look"}] * rig.options.clients)
    rig.daemon.start()
    _take_load(rig, "chaos", load)
    _check_ledger(rig, "ledger after chaos", load)
    all_blocks(rig, "verify after chaos")


def _take_load(rig: Rig, phase: str, load: Load) -> None:
    tally = load.tally
    rig.found.findings += [f"{phase}: {finding}" for finding in tally.findings]
    if rig.watch.reclaimed:
        raise StressError("the store was full and recycled blocks, which it may: nothing can be said about lost ones")
    rig.found.counts[phase] = {**tally.counts, **tally.events, "prompts in the ledger": len(load.ledger),
                                "blocks compared": tally.checked["blocks"], "seconds": tally.seconds}  # fmt: skip


def _check_ledger(rig: Rig, phase: str, load: Load) -> None:
    prompts = [list(runs) for runs in load.ledger]
    total = sum(blocks for runs in prompts for _, blocks in runs)
    clients = rig.options.clients
    commands = [{"do": "verify_prompts", "prompts": prompts[n::clients], "batch": 16} for n in range(clients)]
    merged = verify_blocks(rig, phase, commands, total)
    if merged["blocks"] + merged["missing"] < total:
        rig.found.findings.append(f"{phase}: {merged['blocks']} of {total} durable blocks were compared")
