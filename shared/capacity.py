"""How many KV blocks a number of tokens takes: the one formula by which the gateway and the scheduler refuse, and by
which the worker sizes its cache and runs what was let in.

Where a worker has a `window`, a sequence gives back the blocks that lie wholly before what its next query sees. Before
a step it holds the blocks of window − 1 tokens, and it gets those of the `step_tokens` that it may compute at once; all
of these lie behind one another, but need not begin where a block does.
"""

from __future__ import annotations


def blocks_for(num_tokens: int, block_size: int, num_resident: int = 0) -> int:
    """Blocks of `block_size` tokens that a sequence of `num_tokens` holds at most; only the last one may be part-empty.

    Args:
        num_resident: tokens of it that are in blocks at once, wherever they begin; 0: all, from its first on.
    """
    num_blocks = -(-num_tokens // block_size)
    return min(num_blocks, (num_resident + block_size - 2) // block_size + 1) if num_resident else num_blocks


def resident_tokens(window: int, step_tokens: int) -> int:
    """Most tokens of a sequence that are in blocks at once; 0: all, where there is no window."""
    return window - 1 + step_tokens if window else 0


def fits(num_tokens: int, *, block_size: int, num_blocks: int, num_resident: int = 0) -> bool:
    """Whether one sequence of `num_tokens` (prompt and output) can ever run in `num_blocks` usable blocks."""
    return blocks_for(num_tokens, block_size, num_resident) <= num_blocks


def most_tokens(*, block_size: int, num_blocks: int, num_resident: int, limit: int) -> int:
    """The longest sequence that `fits`, of at most `limit` tokens."""
    if fits(limit, block_size=block_size, num_blocks=num_blocks, num_resident=num_resident):
        return limit
    return num_blocks * block_size


def never_fits_message(num_tokens: int, *, block_size: int, num_blocks: int, num_resident: int = 0) -> str:
    """What a client is told when `fits` is false for the largest worker there is."""
    return (
        f"prompt and max_tokens need {num_tokens} tokens, {blocks_for(num_tokens, block_size, num_resident)} blocks of "
        f"{block_size} tokens; the KV cache has {num_blocks} blocks ({num_blocks * block_size} tokens)"
    )
