"""How many KV blocks a number of tokens takes: the one formula by which the gateway and the scheduler refuse."""

from __future__ import annotations


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks of `block_size` tokens that hold `num_tokens`; only the last one may be part-empty."""
    return -(-num_tokens // block_size)


def fits(num_tokens: int, *, block_size: int, num_blocks: int) -> bool:
    """Whether one sequence of `num_tokens` (prompt and output) can ever run in `num_blocks` usable blocks."""
    return blocks_for(num_tokens, block_size) <= num_blocks


def never_fits_message(num_tokens: int, *, block_size: int, num_blocks: int) -> str:
    """What a client is told when `fits` is false for the largest worker there is."""
    return (
        f"prompt and max_tokens need {num_tokens} tokens, {blocks_for(num_tokens, block_size)} blocks of {block_size} "
        f"tokens; the KV cache has {num_blocks} blocks ({num_blocks * block_size} tokens)"
    )
