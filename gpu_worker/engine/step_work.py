"""Whose a step's time was: its measured seconds, divided over the requests in it.

A chunk's part is its share of the step's cost units (`step_cost.py`): tokens, and the keys that they see. What a step
costs whatever is in it (reading the weights) is divided the same way. Of a chunk the newest token, if it is output, and
the draft behind it are decode; all before is prefill, also output that is computed again after a preemption or on
another worker. Padding of a static batch belongs to those that still run, and time between steps to nobody.
"""

from __future__ import annotations

from typing import NamedTuple

from gpu_worker.engine.chunks import BatchPlan, PlannedChunk
from gpu_worker.engine.step_cost import StepCost
from shared.ids import RequestId
from shared.work_time import US_PER_S


class StepWork(NamedTuple):
    """What one sequence of a request had of a step, in microseconds."""

    request_id: RequestId
    attempt: int
    prefill_us: int
    decode_us: int


def share_out(plan: BatchPlan, cost: StepCost, seconds: float) -> tuple[StepWork, ...]:
    """`seconds` divided over the chunks of `plan`; they add up to `seconds`, rounded to a microsecond."""
    rows = [(chunk.sequence, *_units(chunk, cost)) for chunk in plan.chunks if not chunk.is_padding]
    if not rows or seconds <= 0.0:
        return ()
    all_units = 0.0
    for _, prefill, decode in rows:
        all_units += prefill + decode
    us_per_unit, units, given, shares = round(seconds * US_PER_S) / all_units, 0.0, 0, []
    for sequence, prefill, decode in rows:
        # each end is rounded, not each part, so that nothing is lost between them
        middle = int((units + prefill) * us_per_unit + 0.5) if prefill else given
        units += prefill + decode
        end = int(units * us_per_unit + 0.5)
        shares.append(StepWork(sequence.request_id, sequence.attempt, middle - given, end - middle))
        given = end
    return tuple(shares)


def _units(chunk: PlannedChunk, cost: StepCost) -> tuple[float, float]:
    """Cost units of a chunk: prefill, decode."""
    start, length = chunk.start, chunk.length
    if not chunk.is_sampling or start + length <= chunk.sequence.num_prompt_tokens:
        return cost.units(start, length), 0.0
    decode = cost.units(start + length - 1, chunk.num_rows - length + 1)
    return cost.units(start, length - 1) if length > 1 else 0.0, decode
