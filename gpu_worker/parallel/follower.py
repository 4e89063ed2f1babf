"""A rank that is not the first: it computes its part of what the first one plans, and decides nothing."""

from __future__ import annotations

import torch

from gpu_worker.model.assembly import Parts
from gpu_worker.parallel.orders import Kind, hear, to_copies
from gpu_worker.parallel.team import Team


def follow(team: Team, parts: Parts) -> None:
    """Do what the first rank says until it says that it's over. Raises RuntimeError: the first rank has gone."""
    with torch.inference_mode():
        while True:
            kind, numbers = hear(team)
            match kind:
                case Kind.STEP:
                    parts.inputs.unpack(numbers)
                    parts.decoder.model.start_logits(parts.inputs, parts.cache)()
                case Kind.COPY:
                    assert parts.host_memory is not None, "copies without host memory"
                    parts.host_memory.copy(to_copies(numbers))
                case Kind.END:
                    return
