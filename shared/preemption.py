"""Who leaves the batch for others: are its blocks copied to host memory, or computed again?

One formula for the worker, which evicts when it hits the wall, and for the scheduler, which preempts before that. What
must be copied goes twice, out and in; what must be computed again goes once, at the rate of prompts. Blocks that others
use, too, cost nothing either way and are counted in neither.
"""

from __future__ import annotations

PREEMPTION_MODES = ("auto", "swap", "recompute")
MAX_PLANS_ASIDE = 32
"""So many steps a sequence that was set aside for others leaves its place to them, unless one that runs leaves before:
about a second on a CPU. By then whoever it made room for has come, or never will."""


def is_swapped(
    mode: str, *, num_blocks: int, num_tokens: int, free_swap_blocks: int, block_copy_s: float, token_s: float
) -> bool:
    """Whether a victim goes to host memory.

    Args:
        mode: of `PREEMPTION_MODES`; "swap" and "auto" recompute where there is no room.
        num_blocks: its own blocks, with something computed in them.
        num_tokens: computed tokens in those.
        free_swap_blocks: room in host memory.
        block_copy_s: seconds to copy a block one way; 0: not known, and taken to be cheap, which makes it known.
        token_s: seconds to compute a token of a prompt; 0: not known.
    """
    if mode == "recompute" or not 0 < num_blocks <= free_swap_blocks:
        return False
    return mode == "swap" or token_s == 0 or 2 * num_blocks * block_copy_s <= num_tokens * token_s
