"""Which blocks of sequences that gave way lie in host memory, and what is still to be copied there and back.

Design note. A sequence that gives way loses all of its blocks; what it has computed in those that are its *own* (no
other running sequence has them) may be copied to host blocks first, which are its own until it returns or ends. Whether
that or computing again is cheaper says `shared/preemption.py`, by what copies and tokens have cost lately; without room
for all of them it computes again.

* Blocks that others share are not copied: as long as those run, they are found under their names. If they have gone by
  the time the sequence returns, all behind them is computed again, and its host blocks are given up. That also keeps
  from being copied whatever a sequence shares with a writer that has not computed it yet (`prefix_cache.py`).
* Who returns takes what is found, as everybody does; behind that its host blocks are copied back, and what is in
  neither, its last known token at least, is computed. Nothing counts as computed while a sequence waits.
* Copies are only noted here, in order, and made in that order by `copy`: before the next step starts at the latest. So
  a block may be given to others, and a host block be taken anew, as soon as its copy is noted; and what is to be copied
  back is there for every step that is planned from then on, also if its sequence leaves before.
* While a step computes, a copy to host memory can be made: it reads tokens that earlier steps computed, and the step
  writes others. A copy back can, unless somebody left since the step started, whose blocks it may still write.
* What a step that raised has left is not to be trusted: those sequences compute again. If a copy raises, nobody knows
  what is where, and the engine is broken.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.step_cost import StepCost
from shared.ids import RequestId
from shared.preemption import is_swapped

KEPT_BELIEF = 0.97
"""Of what a copy is believed to cost, after each victim for which that was too much: where the last copies were held up
by something else, or the model has become slower, that is found out after some dozens of victims."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Block `block` of the cache to host block `host_block`, or the other way round (`is_back`)."""

    block: int
    host_block: int
    is_back: bool


class HostMemory(Protocol):
    """Where blocks are copied to: `gpu_worker/model/host_memory.py`, a simulated one in engine tests."""

    @property
    def num_blocks(self) -> int:
        """Host blocks there are; ids 0 .. num_blocks − 1."""
        ...

    @property
    def block_copy_s(self) -> float:
        """What copying a block one way has taken lately, in seconds; 0: not known yet."""
        ...

    def copy(self, copies: Sequence_[BlockCopy]) -> None:
        """Make these copies as if one after another, behind all steps that were started and in front of the next; while
        one computes, none of them touches what it writes."""
        ...


@dataclass(frozen=True, slots=True)
class _Away:
    """The first `num_tokens` tokens of a sequence were computed; `host_blocks` hold its own blocks of them, by their
    place in its block table."""

    num_tokens: int
    host_blocks: dict[int, int]


class SwapSpace:
    """The host blocks of one engine.

    Args:
        memory: None: there are none.
        mode: of `shared/preemption.py`.
        cost: what steps have cost so far.
        pool: of the blocks that are copied.

    Attributes:
        num_sequences: sequences that were put away so far.
        num_copied_out, num_copied_back: blocks copied so far.
    """

    def __init__(self, memory: HostMemory | None, mode: str, cost: StepCost, pool: BlockPool) -> None:
        self.num_blocks = 0 if memory is None else memory.num_blocks
        self.num_sequences = 0
        self.num_copied_out = 0
        self.num_copied_back = 0
        self._memory = memory
        self._mode = mode
        self._cost = cost
        self._pool = pool
        self._free = list(reversed(range(self.num_blocks)))
        self._away: dict[Sequence, _Away] = {}
        self._noted: list[BlockCopy] = []
        self._believed = 1.0

    @property
    def num_free(self) -> int:
        """Host blocks that nobody has."""
        return len(self._free)

    @property
    def block_copy_s(self) -> float:
        """What copying a block one way has taken lately, in seconds; 0: not known yet."""
        return 0.0 if self._memory is None else self._memory.block_copy_s

    @property
    def request_ids(self) -> Iterable[RequestId]:
        """Requests of which something is in host memory; one may come more than once."""
        return (sequence.request_id for sequence in self._away)

    def num_blocks_of(self, sequence: Sequence) -> int:
        """Host blocks of a sequence."""
        away = self._away.get(sequence)
        return 0 if away is None else len(away.host_blocks)

    def put_away(self, sequence: Sequence, *, is_told: bool = False) -> None:
        """`sequence`, which still has its blocks, gives way: note copies of its own ones if they are worth it, or if we
        are told to (`is_told`) by somebody who has looked at what that costs."""
        if not self._free:
            return
        mode = "swap" if is_told and self._mode == "auto" else self._mode
        own, num_tokens = self._own(sequence)
        if not is_swapped(
            mode, num_blocks=len(own), num_tokens=num_tokens, free_swap_blocks=len(self._free),
            block_copy_s=self._believed * self.block_copy_s, token_s=self._token_s(sequence.num_computed, num_tokens),
        ):  # fmt: skip
            self._believed *= KEPT_BELIEF
            return
        self._believed = 1.0
        host_blocks = {index: self._free.pop() for index in own}
        self._away[sequence] = _Away(sequence.num_computed, host_blocks)
        self._noted += [BlockCopy(sequence.block_ids[i], host, is_back=False) for i, host in host_blocks.items()]
        self.num_sequences += 1

    def bring_back(self, sequence: Sequence) -> None:
        """`sequence` has blocks for all of its tokens again, the first of which were found and count as computed: note
        copies into those behind them, which count as computed, too. It has no host blocks any more."""
        away = self._away.get(sequence)
        if away is None:
            return
        size = self._pool.block_size
        first = end = sequence.num_computed // size
        while end in away.host_blocks and end < len(sequence.block_ids):
            self._noted.append(BlockCopy(sequence.block_ids[end], away.host_blocks[end], is_back=True))
            end += 1
        if end > first:
            sequence.num_computed = min(away.num_tokens, end * size)
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Its host blocks, if it has any, are free."""
        away = self._away.pop(sequence, None)
        if away is not None:
            self._free += reversed(away.host_blocks.values())

    def copy(self, *, is_computing: bool = False, may_bring_back: bool = True) -> None:
        """Make the copies that were noted.

        Args:
            is_computing: while a step does: those only that may be made then.
            may_bring_back: whether copies back are among these.
        """
        copies = self._noted
        if is_computing and not may_bring_back:
            copies = list(takewhile(lambda copy: not copy.is_back, copies))
        if not copies:
            return
        assert self._memory is not None
        self._memory.copy(copies)
        self._noted = self._noted[len(copies) :]
        num_back = sum(copy.is_back for copy in copies)
        self.num_copied_out += len(copies) - num_back
        self.num_copied_back += num_back

    def check_integrity(self, waiting: Iterable[Sequence]) -> None:
        """Raise AssertionError unless each host block is free or of one sequence, which waits."""
        taken = [host for away in self._away.values() for host in away.host_blocks.values()]
        assert sorted(taken + self._free) == list(range(self.num_blocks)), "host blocks are lost or owned twice"
        assert self._away.keys() <= set(waiting), "host blocks of a sequence that does not wait"
        assert all(s.num_known > away.num_tokens for s, away in self._away.items())

    def _own(self, sequence: Sequence) -> tuple[list[int], int]:
        """Places in its block table of the blocks that only `sequence` has and has computed something in, and how many
        tokens that is."""
        size, end = self._pool.block_size, sequence.num_computed
        block_ids = sequence.block_ids[: self._pool.blocks_for(end)]
        own = [i for i, block in enumerate(block_ids) if not self._pool.is_shared(block)]
        return own, sum(min(size, end - i * size) for i in own)

    def _token_s(self, end: int, num_tokens: int) -> float:
        """What computing one of the `num_tokens` tokens before `end` takes, in seconds; 0: not known."""
        return self._cost.unit_s * self._cost.units(end - num_tokens, num_tokens) / max(1, num_tokens)
