"""Which blocks a sequence needs when the model's layers see a window of it only.

Design note. The query at position p sees keys p − window + 1 .. p. So of a sequence whose first `num_computed` tokens
are computed, blocks that lie wholly before num_computed − window + 1 are read by no step to come: they are given back
as soon as the step that computed the tokens is over, before the next one is planned. A sequence that is set back has
lost all of its blocks, and begins again from what it finds.

* The entries of such blocks stay at the front of `block_ids`, where positions count from 0; `num_freed_blocks` says how
  many there are. They may be blocks of others by now: attention does not read them.
* Blocks come as they are needed, for the tokens that the next step may compute, not for a whole prompt at once. So a
  sequence never holds more than `shared/capacity.py` says, and one that is alone in the pool can always go on; beside
  others it may find no free block for its next chunk, and then the last in rank is evicted, as for a drawn token.
* A freed block stays findable as long as the pool can spare it (`prefix_cache.py`). Of those freed early the first ones
  are given away first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvWindow:
    """The window of one engine.

    Attributes:
        tokens: that a query sees, itself among them; 0: all, and nothing is freed early.
        step_tokens: most tokens of a sequence that a step computes.
        block_size: tokens in a block.
    """

    tokens: int
    step_tokens: int
    block_size: int

    def first_block(self, position: int) -> int:
        """The first block of what the query at `position` sees."""
        return max(0, position - self.tokens + 1) // self.block_size if self.tokens else 0

    def num_covered(self, num_known: int, num_computed: int) -> int:
        """Tokens, from the first one on, that must have got blocks before the next step."""
        return min(num_known, num_computed + self.step_tokens) if self.tokens else num_known
