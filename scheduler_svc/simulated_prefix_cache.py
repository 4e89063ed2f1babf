"""The prefix cache of a simulated worker: `gpu_worker/engine/prefix_cache.py` and its pool, by counts in place of ids.

What requests share is the whole beginning of their prompts that they name; so the blocks of one prefix form a *chain*
that is in use as a whole or not at all, and a number says how many of them can be found. Unused blocks stay findable
until others need them: first what has been unused for longest, of a chain its last block first. Everything else that a
sequence has computed stays, too, and takes its turn in that order, though nobody looks for it: who was evicted finds
what it shares with others and computes the rest again.

Whoever is admitted first computes what is missing of a prefix, as its *writer*; the others wait for it. When it leaves
before that is done, the first of those computes on; one that is more urgent than the writer takes it over, and does not
wait. An entry or a departure costs O(1), and O(names) where they come or go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from scheduler_svc.simulation_trace import SimulatedRequest
from shared.prefix import KEY_BYTES, SHORT_BYTES, PrefixNames, scope_of
from shared.prefix_journal import PrefixJournal

Names = tuple[bytes, ...]
_KEY = bytes(KEY_BYTES)


class Sharer(Protocol):
    """A sequence: the names of the blocks that it shares (the same object for all that do), its place in the worker's
    order, how many of its tokens are computed, and the blocks that it found when it was admitted."""

    prefix: Names
    order: tuple[int, int, int]
    num_computed: int
    num_found: int


class SharedNames:
    """Short names of the blocks that requests share, as gateways and workers make them."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int, int], Names] = {}

    def of(self, request: SimulatedRequest, block_size: int) -> Names:
        """Those of the full blocks of its prefix that a prompt may find: not the one of its last token."""
        if request.prefix is None:
            return ()
        num_blocks = min(request.prefix.num_tokens, request.prompt_len - 1) // block_size
        key = (request.tenant, request.prefix.number, num_blocks, block_size)
        if key not in self._known:
            maker, names = PrefixNames(_KEY, block_size), list[bytes]()
            tokens = [request.prefix.number] * (num_blocks * block_size)
            maker.extend(names, maker.root(scope_of(request.tenant, "")), tokens)
            self._known[key] = tuple(name[:SHORT_BYTES] for name in names)
        return self._known[key]


@dataclass(slots=True, eq=False)
class _Chain:
    """The first `num_blocks` blocks of `names` can be found, or will, once `writer` has computed them; without names
    so many that nobody looks for."""

    names: Names
    num_blocks: int = 0
    num_users: int = 0
    writer: Sharer | None = None

    def num_computed(self, block_size: int) -> int:
        """Blocks that are computed."""
        return self.num_blocks if self.writer is None else min(self.num_blocks, self.writer.num_computed // block_size)


class SimulatedPrefixCache:
    """What one worker has of which prefix. `num_unused` of its free blocks hold something that could be found."""

    def __init__(self, block_size: int) -> None:
        self.num_unused = 0
        self.journal = PrefixJournal()
        self._block_size = block_size
        self._chains: dict[bytes, _Chain] = {}
        self._unused: OrderedDict[_Chain, None] = OrderedDict()

    @property
    def num_used(self) -> int:
        """Blocks of prefixes that sequences use."""
        return sum(len(chain.names) for chain in self._chains.values() if chain.num_users)

    def num_in_use(self, names: Names) -> int:
        """Blocks of a prefix that somebody has, so that they need not be free."""
        chain = self._chains.get(names[-1]) if names else None
        return len(names) if chain is not None and chain.num_users else 0

    def is_shared(self, names: Names) -> bool:
        """Whether several have a prefix."""
        chain = self._chains.get(names[-1]) if names else None
        return chain is not None and chain.num_users > 1

    def is_computed(self, names: Names) -> bool:
        """Whether all of a prefix is there."""
        chain = self._chains.get(names[-1]) if names else None
        return not names or (chain is not None and chain.num_computed(self._block_size) == len(names))

    def enter(self, sequence: Sharer) -> None:
        """`sequence` is admitted: it uses its prefix, finds what there is of it, and has the rest to compute."""
        names = sequence.prefix
        sequence.num_found = 0
        if not names:
            return
        chain = self._chains.setdefault(names[-1], _Chain(names))
        if not chain.num_users and chain in self._unused:
            del self._unused[chain]
            self.num_unused -= chain.num_blocks
        chain.num_users += 1
        writer = chain.writer
        if writer is not None and writer.order < sequence.order:
            sequence.num_found = len(names)
            return
        sequence.num_found = chain.num_computed(self._block_size)
        sequence.num_computed = max(sequence.num_computed, sequence.num_found * self._block_size)
        if sequence.num_found < len(names):
            self._note(names[chain.num_blocks :], has_come=True)
            chain.num_blocks, chain.writer = len(names), sequence

    def is_ready(self, sequence: Sharer, planned: Iterable[tuple[Sharer, int]]) -> bool:
        """Whether what others compute of its prefix is there, or will be with the step that computes so many tokens of
        each of `planned`; then it goes on behind that."""
        end = len(sequence.prefix) * self._block_size
        if sequence.num_computed >= end:
            return True
        writer = self._chains[sequence.prefix[-1]].writer
        if writer is sequence:
            return True
        if writer is not None:
            computed = (other.num_computed + length for other, length in planned if other is writer)
            if max(computed, default=writer.num_computed) < end:
                return False
        sequence.num_computed = end
        return True

    def leave(self, sequence: Sharer, num_own: int, running: Iterable[Sharer]) -> int:
        """`sequence` leaves its blocks, `num_own` of them full ones of its own; the blocks of its prefix that are free
        by that. One of `running`, in their order, takes over what it has not computed and another one waits for."""
        self._keep(num_own)
        names = sequence.prefix
        if not names:
            return 0
        chain = self._chains[names[-1]]
        chain.num_users -= 1
        if chain.writer is sequence:
            self._hand_on(chain, running)
        if chain.num_users:
            return 0
        if chain.num_blocks:
            self._unused[chain] = None
            self.num_unused += chain.num_blocks
        else:
            del self._chains[names[-1]]
        return len(names)

    def trim(self, num_free: int) -> None:
        """Only `num_free` blocks of the worker are free: forget what was in the others."""
        while self.num_unused > num_free:
            chain = next(iter(self._unused))
            left = max(0, chain.num_blocks - (self.num_unused - num_free))
            self.num_unused -= chain.num_blocks - left
            self._note(chain.names[left : chain.num_blocks][::-1], has_come=False)
            chain.num_blocks = left
            if not left:
                del self._unused[chain]
                if chain.names:
                    del self._chains[chain.names[-1]]

    def _hand_on(self, chain: _Chain, running: Iterable[Sharer]) -> None:
        """The writer of `chain` leaves."""
        num_computed = chain.num_computed(self._block_size)
        chain.writer = None
        if num_computed == len(chain.names):
            return
        heir = next((s for s in running if s.prefix is chain.names), None)
        if heir is None:
            self._note(chain.names[num_computed : chain.num_blocks], has_come=False)
            chain.num_blocks = num_computed
        else:
            heir.num_computed = max(heir.num_computed, num_computed * self._block_size)
            chain.writer = heir

    def _keep(self, num_blocks: int) -> None:
        """So many blocks that were somebody's own become free, behind all that are."""
        if num_blocks <= 0:
            return
        last = next(reversed(self._unused), None)
        if last is None or last.names:
            last = _Chain(())
            self._unused[last] = None
        last.num_blocks += num_blocks
        self.num_unused += num_blocks

    def _note(self, names: Names, *, has_come: bool) -> None:
        self.journal.note((name, has_come) for name in names)
