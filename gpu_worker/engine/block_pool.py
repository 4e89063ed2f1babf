"""The KV blocks of one worker: which are free and how many sequences use each of the others.

The pool knows ids and counts only; what a block holds is the model's business (`KvLayout`). A block can have several
owners (shared prefixes), so owners take and give back *references*; the last one given back frees the block.

A block can be *kept*: what it holds can be found again (`prefix_cache.py`). It is free like any other once nobody owns
it, but taken last, and of those the one first that has been free for longest. All operations are O(blocks named), none
looks at the whole pool except `check_integrity`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Blocks 0 .. num_blocks − 1 of `block_size` tokens each.

    `most_owned`: the most blocks that had owners at any time.

    Args:
        forget: called with each kept block that is given to a new owner, who will write over it.
    """

    __slots__ = ("_forget", "_free", "_free_kept", "_kept", "_num_owners", "block_size", "most_owned", "num_blocks")

    def __init__(self, num_blocks: int, block_size: int, forget: Callable[[int], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._forget = forget
        self._free = list(reversed(range(num_blocks)))
        self._free_kept: OrderedDict[int, None] = OrderedDict()
        self._kept: set[int] = set()
        self._num_owners = [0] * num_blocks
        self.most_owned = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free) + len(self._free_kept)

    @property
    def num_kept(self) -> int:
        """Blocks that are kept, owned or not."""
        return len(self._kept)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def num_owned(self, block_ids: Iterable[int]) -> int:
        """How many of these have an owner."""
        return sum(self._num_owners[block] > 0 for block in block_ids)

    def is_shared(self, block: int) -> bool:
        """Whether a block has more than one owner."""
        return self._num_owners[block] > 1

    def num_shared(self, block_ids: Sequence[int]) -> int:
        """How many of these, a stretch of a table, have more than one owner. Whoever has one of a prefix has those
        before it, so they are looked for by bisection; where owners give back early blocks first, that is a guess."""
        return bisect_left(block_ids, True, key=lambda block: not self.is_shared(block))

    def allocate(self, count: int) -> list[int]:
        """`count` free blocks, now with one owner each; the caller has looked at `num_free`."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        taken = [self._take() for _ in range(count)]
        for block in taken:
            self._num_owners[block] = 1
        self._note_owned()
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Add an owner to blocks that have one or are kept."""
        for block in block_ids:
            if self._num_owners[block] == 0:
                assert block in self._kept, f"block {block} is free and cannot be shared"
                del self._free_kept[block]
            self._num_owners[block] += 1
        self._note_owned()

    def free(self, block_ids: Sequence[int]) -> None:
        """Take an owner away from each block; those left with none are free. Of a table the last block counts as free
        first: without what is before it, nobody finds it."""
        for block in reversed(block_ids):
            assert self._num_owners[block] > 0, f"block {block} is freed twice"
            self._num_owners[block] -= 1
            if self._num_owners[block] == 0:
                if block in self._kept:
                    self._free_kept[block] = None
                else:
                    self._free.append(block)

    def keep(self, block: int) -> None:
        """What this block, which has an owner, holds (or will hold) can be found from now on."""
        assert self._num_owners[block] > 0, f"block {block} is free and cannot be kept"
        self._kept.add(block)

    def unkeep(self, block: int) -> None:
        """It cannot be found any more."""
        self._kept.remove(block)
        if self._num_owners[block] == 0:
            del self._free_kept[block]
            self._free.append(block)

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless exactly the blocks in `block_tables` have owners, as many as name them."""
        owners = Counter(block for table in block_tables for block in table)
        for block, count in enumerate(self._num_owners):
            assert count == owners[block], f"block {block} counts {count} owners and has {owners[block]}"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert not free & self._kept, "a kept block is in the free list of others"
        assert self._free_kept.keys() == self._kept - owners.keys(), "kept blocks and owners disagree"
        assert free | self._free_kept.keys() == set(range(self.num_blocks)) - owners.keys(), "free and owned disagree"

    def _note_owned(self) -> None:
        self.most_owned = max(self.most_owned, self.num_blocks - self.num_free)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block, _ = self._free_kept.popitem(last=False)
        self._kept.remove(block)
        if self._forget is not None:
            self._forget(block)
        return block
