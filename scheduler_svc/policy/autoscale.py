"""How many workers the scheduler would like: a function of the cell as it is and of how long it has been so.

    work = serving workers * the fuller of their slots and blocks + queued requests / slots of a worker
    need = work / target share

More are wanted when clients notice (the oldest waits, or first tokens come, later than the target, or blocks are nearly
all in use) for `grow_after_s` on end; fewer when the need has been smaller for `shrink_after_s` on end, and then no
fewer than the largest need of that time. So a pause in a burst sends nobody away, and a flicker starts nobody.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleConfig:
    """Limits and patience. Shares are of 1."""

    min_workers: int
    max_workers: int
    ttft_target_s: float = 0.5
    grow_after_s: float = 2.0
    shrink_after_s: float = 60.0
    target_share: float = 0.75
    full_share: float = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The cell at `now` (seconds). `num_workers` counts those that are starting, too; those that drain count nowhere.

    `slot_share` and `block_share` are what is in use of the serving workers' slots and blocks. `ttft_s` is that of
    recent first tokens, 0 without any.
    """

    now: float
    num_workers: int
    num_serving: int
    slots_per_worker: int
    num_queued: int
    oldest_wait_s: float
    slot_share: float
    block_share: float
    ttft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Since when the cell has been late, and has had more workers than it needs; None: it is not so. `peak` is the
    largest need since then."""

    late_since: float | None = None
    spare_since: float | None = None
    peak: int = 0


def wish(picture: Picture, memory: Memory, config: AutoscaleConfig) -> tuple[int, Memory]:
    """The number of workers wanted now, and what to remember for the next call."""
    need = _need(picture, config)
    memory = _remember(picture, memory, config, need)
    wanted = picture.num_workers
    if memory.late_since is not None and picture.now - memory.late_since >= config.grow_after_s:
        # Those that are starting are an answer under way: without them, one more than what is not enough.
        is_waiting = picture.num_workers > picture.num_serving
        wanted = max(need, picture.num_workers + (not is_waiting))
    elif memory.spare_since is not None and picture.now - memory.spare_since >= config.shrink_after_s:
        wanted = memory.peak
    wanted = min(config.max_workers, max(config.min_workers, wanted))
    return wanted, memory


def _need(picture: Picture, config: AutoscaleConfig) -> int:
    used = picture.num_serving * max(picture.slot_share, picture.block_share)
    work = used + picture.num_queued / picture.slots_per_worker
    return min(config.max_workers, max(config.min_workers, math.ceil(work / config.target_share)))


def _remember(picture: Picture, memory: Memory, config: AutoscaleConfig, need: int) -> Memory:
    is_late = (
        (picture.num_queued > 0 and picture.oldest_wait_s > config.ttft_target_s)
        or picture.ttft_s > config.ttft_target_s
        or picture.block_share >= config.full_share
    )
    late_since = (picture.now if memory.late_since is None else memory.late_since) if is_late else None
    if is_late or need >= picture.num_workers:
        return Memory(late_since=late_since)
    if memory.spare_since is None:
        return Memory(spare_since=picture.now, peak=need)
    return replace(memory, late_since=None, peak=max(memory.peak, need))
