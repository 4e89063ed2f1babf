"""Equal steps made in one go: how many may pass before something happens that the rest of the cell can notice.

While every sequence of a worker decodes, each step costs the same and gives each of them a token. So the times of all
steps up to the next event that matters (a sequence ends, blocks run out, a report is due, a message arrives) are known
at once. The times are added up one by one, as single steps would, since sums of floats depend on that.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Run:
    """Steps under way: `ends_s` are the times at which they end, the first `num_done` of them are accounted for."""

    ends_s: list[float]
    num_done: int = 0

    @property
    def end_s(self) -> float:
        return self.ends_s[-1]

    def steps_until(self, now: float) -> int:
        """Steps that have ended by `now` and are not accounted for yet; counts them as accounted for.

        The last step is never among them: it ends in an event of its own.
        """
        num_ended = min(bisect_right(self.ends_s, now), len(self.ends_s) - 1)
        new = num_ended - self.num_done
        self.num_done = num_ended
        return new

    def cut_after(self, now: float) -> bool:
        """Let the step that is under way at `now` be the last; whether that shortens the run."""
        return self._cut(bisect_right(self.ends_s, now))

    def cut_at(self, arrival_s: float, now: float) -> bool:
        """Let the first step that ends at `arrival_s` or later, and is not over at `now`, be the last; whether that
        shortens the run."""
        return self._cut(max(bisect_left(self.ends_s, arrival_s), bisect_right(self.ends_s, now)))

    def _cut(self, last: int) -> bool:
        if last >= len(self.ends_s) - 1:
            return False
        del self.ends_s[last + 1 :]
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What ends a run early: a report is due at the first step that ends at `calm_s` or later, or at `growth_s` or
    later with at most `low_blocks` free."""

    calm_s: float
    growth_s: float
    low_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a run starts with: seconds, those that a step takes, and the worker's free blocks and block size."""

    now_s: float
    step_s: float
    free_blocks: int
    block_size: int


def plan_run(known: Sequence[int], max_steps: int, start: Start, limits: Limits) -> Run | None:
    """The longest run of equal steps from now on; None if not even one step has the blocks it takes.

    Args:
        known: known tokens of each sequence, all of which decode and have blocks for one token less.
        max_steps: steps until the first of them ends.
    """
    # A sequence with k known tokens takes a block at the step that computes token k, the first of its block.
    takes = [0] * start.block_size
    for num_known in known:
        takes[num_known % start.block_size] += 1
    now_s, step_s, free_blocks = start.now_s, start.step_s, start.free_blocks
    ends_s: list[float] = []
    for step in range(max_steps):
        free_blocks -= takes[(1 - step) % start.block_size]
        if free_blocks < 0:
            break
        now_s += step_s
        ends_s.append(now_s)
        if now_s >= limits.calm_s or (now_s >= limits.growth_s and free_blocks <= limits.low_blocks):
            break
    return Run(ends_s) if ends_s else None
