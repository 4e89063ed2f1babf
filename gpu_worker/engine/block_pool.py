"""The KV blocks of one worker: which are free and how many sequences use each of the others.

The pool knows ids and counts only; what a block holds is the model's business (`KvLayout`). A block can have several
owners (shared prefixes, forks), so owners take and give back *references*; the last one given back frees the block.
All operations are O(blocks named), none looks at the whole pool except `check_integrity`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks 0 .. num_blocks − 1 of `block_size` tokens each."""

    __slots__ = ("_free", "_num_owners", "block_size", "num_blocks")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(reversed(range(num_blocks)))
        self._num_owners = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """`count` free blocks, now with one owner each; the caller has looked at `num_free`."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._num_owners[block] = 1
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Add an owner to blocks that have one."""
        for block in block_ids:
            assert self._num_owners[block] > 0, f"block {block} is free and cannot be shared"
            self._num_owners[block] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Take an owner away from each block; those left with none are free."""
        for block in block_ids:
            assert self._num_owners[block] > 0, f"block {block} is freed twice"
            self._num_owners[block] -= 1
            if self._num_owners[block] == 0:
                self._free.append(block)

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless exactly the blocks in `block_tables` have owners, as many as name them."""
        owners = Counter(block for table in block_tables for block in table)
        for block, count in enumerate(self._num_owners):
            assert count == owners[block], f"block {block} counts {count} owners and has {owners[block]}"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert free == set(range(self.num_blocks)) - owners.keys(), "free list and owners disagree"
