"""Which blocks hold which prefixes, so that what is known of a prompt is not computed twice.

Design note. A block has a name (`shared/prefix.py`) when all of its tokens are known, and holds what the name says once
they are computed. Equal names mean equal keys and values, bit by bit where the model's rows do not depend on their
batch, so a *hit* (finding a block instead of computing it) never changes a token.

* When a sequence is admitted it takes the longest run of blocks that are found under the names of its own tokens, all
  but the last token, which is computed in any case to draw the next one.
* It enters the rest of its full blocks at once, as their *writer*, before they are computed. Who shares such a block
  waits: its chunks are planned once the writer has computed it or does so in the same step, whose rows all write keys
  and values before they attend. So a prefix that many bring at the same time is computed once. Nobody waits for a
  sequence that is less urgent than itself.
* A writer that leaves early (aborted, evicted, failed) hands what it did not compute to the first of those who wait for
  it; what nobody waits for is forgotten.
* Full blocks of drawn tokens are entered when they are computed.
* Blocks stay findable when their last owner leaves, until the pool gives them away (`block_pool.py`).
* The samples of one request (`n`) share its prompt in this way, too, and do so even where nothing else is to be found.
  Each computes its own part-filled last block: at most a block of tokens, where a copy would be one more op in a step.

A name that is known keeps its first block; a second one with the same content is not entered.

With a window (`kv_window.py`) a hit is the longest prefix of which all blocks are known that its next query sees; what
lies before them may be gone. A block is entered when it is computed, so nobody waits for a writer: the others of a
request's samples are admitted when the first one has computed their prompt (`is_being_computed`), other sequences that
come together with one prefix each compute it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.kv_window import KvWindow
from gpu_worker.engine.sequence import Sequence, order_of
from shared.prefix import PrefixNames


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """`block_ids` hold the first tokens of a sequence, or will, once `writer` has computed `num_awaited` of its own.
    `num_skipped` blocks before these are not needed."""

    block_ids: tuple[int, ...] = ()
    writer: Sequence | None = None
    num_awaited: int = 0
    num_skipped: int = 0

    @property
    def num_blocks(self) -> int:
        """All that need not be computed."""
        return self.num_skipped + len(self.block_ids)


NO_HIT = PrefixHit()


class PrefixCache:
    """Finds blocks by what they hold.

    Args:
        key: of the names.
        is_shared: requests find what others have computed; else only the samples of one request do.
        num_blocks, block_size: of the pool, which belongs to the cache and is made by it.
        window: what a sequence needs of its blocks; None: all.

    Attributes:
        num_queried_tokens, num_hit_tokens: of all prompts, and evicted sequences, that were admitted so far.
    """

    def __init__(
        self, num_blocks: int, block_size: int, key: bytes, *, is_shared: bool, window: KvWindow | None = None
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size, self._forget)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._names = PrefixNames(key, block_size)
        self._is_shared = is_shared
        self._window = window if window is not None and window.tokens else None
        self._blocks: dict[bytes, int] = {}
        self._names_of: dict[int, bytes] = {}
        self._journal: list[tuple[bytes, bool]] = []
        self._writers: dict[int, Sequence] = {}  # of each block that is not computed for certain

    def find(self, sequence: Sequence) -> PrefixHit:
        """The blocks of the longest prefix of a waiting sequence that there is. One that is alone finds computed ones
        only, since those it would wait for do not run."""
        if not self._blocks:
            return NO_HIT
        if self._window is not None:
            return self._find_within(sequence, self._window)
        found: list[int] = []
        writer, num_awaited = None, 0
        for name in self._named(sequence)[: (sequence.num_known - 1) // self.pool.block_size]:
            block = self._blocks.get(name)
            if block is None:
                break
            needed = self._writers.get(block)
            if needed is not None:
                if not _may_await(sequence, needed, writer):
                    break
                writer, num_awaited = needed, (len(found) + 1) * self.pool.block_size
            found.append(block)
        return PrefixHit(tuple(found), writer, num_awaited)

    def is_being_computed(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether one of `running`, another sample of the same request, is computing the full blocks of the waiting
        `sequence`, which will find them with a window only when they are computed."""
        if self._window is None:
            return False
        num_blocks, known = (sequence.num_known - 1) // self.pool.block_size, sequence.token_ids
        return any(
            other.request_id == sequence.request_id
            and other.num_settled < num_blocks
            and other.token_ids[: len(known)] == known
            for other in running
        )

    def enter(self, sequence: Sequence, hit: PrefixHit) -> None:
        """`sequence` was admitted with `hit` and blocks for the rest of its known tokens, which it will compute."""
        num_hit = hit.num_blocks * self.pool.block_size
        sequence.num_computed = num_hit
        sequence.writer, sequence.num_awaited = hit.writer, hit.num_awaited
        sequence.num_found_blocks = sequence.num_settled = hit.num_blocks
        if sequence.num_output == 0 and sequence.num_cached is None:
            sequence.num_cached = min(num_hit, sequence.num_prompt_tokens)
        self.num_queried_tokens += sequence.num_known
        self.num_hit_tokens += num_hit
        sequence.num_entered = hit.num_blocks
        if self._window is not None:
            return
        names = self._named(sequence)
        for index in range(len(hit.block_ids), len(names)):
            if self._enter(names[index], sequence.block_ids[index]):
                self._writers[sequence.block_ids[index]] = sequence
        sequence.num_entered = len(names)

    def note_computed(self, sequence: Sequence) -> None:
        """More tokens of a running sequence are computed, for certain: nobody waits for those blocks any more, and the
        ones of drawn tokens can be found."""
        num_full = sequence.num_computed // self.pool.block_size
        if num_full <= sequence.num_settled:
            return
        names = self._named(sequence)
        for index in range(sequence.num_settled, num_full):
            block = sequence.block_ids[index]
            if index >= sequence.num_entered:
                self._enter(names[index], block)
            elif self._writers.get(block) is sequence:
                del self._writers[block]
        sequence.num_settled = num_full
        sequence.num_entered = max(sequence.num_entered, num_full)

    def leave(self, sequence: Sequence, running: Iterable[Sequence]) -> None:
        """`sequence` stops running; it still has its blocks. Those of `running`, in their order, who wait for it take
        over what it has not computed."""
        heirs: dict[int, Sequence] = {}
        for other in running:
            if other.writer is sequence:
                self._inherit(other, sequence, heirs)
        for block in sequence.block_ids[sequence.num_settled : sequence.num_entered]:
            if self._writers.get(block) is not sequence:
                continue
            if block in heirs:
                self._writers[block] = heirs[block]
            else:
                self._forget(block)
                self.pool.unkeep(block)
        sequence.num_entered = sequence.num_settled = 0
        sequence.writer = None
        sequence.num_found_blocks = 0

    def take_changes(self) -> list[tuple[bytes, bool]]:
        """Names that came (True) and went since the last call, in order; none where nothing is shared."""
        changes, self._journal = self._journal, []
        return changes

    def check_integrity(self) -> None:
        """Raise AssertionError unless names and blocks agree."""
        assert {name: block for block, name in self._names_of.items()} == self._blocks
        assert len(self._names_of) == self.pool.num_kept
        assert self._writers.keys() <= self._names_of.keys()

    def _find_within(self, sequence: Sequence, window: KvWindow) -> PrefixHit:
        """The longest prefix, but for the last token, whose end sees known blocks only."""
        names = self._named(sequence)[: (sequence.num_known - 1) // self.pool.block_size]
        end = len(names)
        for index in reversed(range(len(names))):
            if names[index] not in self._blocks:
                end = index
                continue
            first = min(index, window.first_block(end * self.pool.block_size))
            if index == first:
                return PrefixHit(tuple(self._blocks[name] for name in names[first:end]), num_skipped=first)
        return NO_HIT

    def _inherit(self, heir: Sequence, leaver: Sequence, heirs: dict[int, Sequence]) -> None:
        """`heir`, which shares blocks with `leaver`, computes those that neither `leaver` nor an earlier heir does."""
        size = self.pool.block_size
        last = heir.num_awaited // size
        first = min(last, leaver.num_computed // size)
        if first == last:
            heir.writer = None
            return
        heir.writer, heir.num_awaited = leaver.writer, leaver.num_awaited
        while first < last and heir.block_ids[first] in heirs:
            first += 1
            heir.writer, heir.num_awaited = heirs[heir.block_ids[first - 1]], first * size
        if first < last:
            heir.num_computed = min(heir.num_computed, first * size)
            heir.num_settled = min(heir.num_settled, first)
            heirs.update(dict.fromkeys(heir.block_ids[first:last], heir))

    def _named(self, sequence: Sequence) -> list[bytes]:
        """Names of its full blocks of known tokens."""
        names = sequence.prefix_names
        if len(names) < sequence.num_known // self.pool.block_size:
            scope = sequence.cache_scope if self._is_shared else ("request", sequence.request_id)
            self._names.extend(names, self._names.root(scope), sequence.token_ids)
        return names

    def _enter(self, name: bytes, block: int) -> bool:
        """Whether the name is new, and now `block`'s."""
        if name in self._blocks:
            return False
        self._blocks[name] = block
        self._names_of[block] = name
        self.pool.keep(block)
        self._note(name, has_come=True)
        return True

    def _forget(self, block: int) -> None:
        name = self._names_of.pop(block)
        del self._blocks[name]
        self._writers.pop(block, None)
        self._note(name, has_come=False)

    def _note(self, name: bytes, *, has_come: bool) -> None:
        if self._is_shared:
            self._journal.append((name, has_come))


def _may_await(sequence: Sequence, writer: Sequence, before: Sequence | None) -> bool:
    """Whether `sequence` may wait for `writer`, behind blocks that it awaits from `before`: one that itself waits for
    `before` computes after it, of another nobody knows."""
    is_in_line = before is None or before is writer or writer.writer is before
    return is_in_line and not sequence.is_alone and order_of(writer) < order_of(sequence)
