"""All rules, and what a snapshot leaves open."""

from __future__ import annotations

from quire.advise import memory_rules as memory
from quire.advise import speed_rules as speed
from quire.advise.advice import Advice, in_order
from quire.advise.snapshot import Snapshot

RULES = (
    memory.prefix_cache_off,
    memory.prefixes_do_not_repeat,
    memory.block_size,
    memory.memory_utilization,
    memory.kv_quantization,
    memory.preemptions,
    speed.comparison_baselines,
    speed.batch_limit,
    speed.idle_blocks,
    speed.scheduling_cost,
    speed.token_budget,
    speed.first_token,
    speed.next_token,
)


def advise(snapshot: Snapshot) -> list[Advice]:
    """What to set, in the order in which to try it."""
    return in_order(advice for rule in RULES if (advice := rule(snapshot)) is not None)


def open_questions(s: Snapshot) -> list[str]:
    """What could not be judged, and why."""
    notes = []
    if not s.settings.max_num_seqs and "max_num_seqs" not in s.settings.differing:
        notes.append("the workers do not say how they are set: rules that ask for a setting were left out")
    if s.settings.differing:
        named = ", ".join(s.settings.differing)
        notes.append(f"the workers are not set alike ({named}): rules that ask for these were left out")
    if s.num_ended < memory.MIN_ENDED:
        notes.append(
            f"only {s.num_ended:.0f} requests ended: too few to judge block size and latency; look while there is load"
        )
    if s.num_waiting < 1:
        notes.append("nothing waits now: whether slots or blocks are short can be seen under load only")
    return notes
