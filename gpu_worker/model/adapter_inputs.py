"""The part of a step's inputs that says which rows have which adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from gpu_worker.engine.chunks import BatchPlan
from kernels.lora_matmul import NO_SLOT, group_rows

Slots = Mapping[object, int]
"""The slot of each adapter that a plan's sequences have."""


def adapter_arrays(plan: BatchPlan, slots: Slots) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
    """The groups of the plan's rows, and of its wanted rows as these are numbered: names in `struct step` and
    contents."""
    of_chunks = [slots.get(chunk.sequence.adapter, NO_SLOT) for chunk in plan.chunks]
    counts = [chunk.num_rows for chunk in plan.chunks]
    wanted = [1 + len(chunk.draft) if chunk.is_sampling else 0 for chunk in plan.chunks]
    for prefix, repeats in (("", counts), ("wanted_", wanted)):
        rows, starts, found = group_rows(np.repeat(np.array(of_chunks, dtype=np.int64), repeats))
        yield f"{prefix}group_rows", rows
        yield f"{prefix}group_starts", np.array(starts, dtype=np.int64)
        yield f"{prefix}group_slots", np.array(found, dtype=np.int64)
