"""What a model with `--enable-lora` knows of adapters."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker.engine.chunks import BatchPlan
from gpu_worker.lora.adapter import Adapter, AdapterSlots, AdapterStore


@dataclass(frozen=True, slots=True)
class LoadedAdapters:
    """`store` reads and keeps them, `slots` are what a step computes with."""

    store: AdapterStore
    slots: AdapterSlots

    def slots_of(self, plan: BatchPlan) -> dict[object, int]:
        """A slot for each adapter of the plan's sequences."""
        adapters = [chunk.sequence.adapter for chunk in plan.chunks]
        return dict(self.slots.give(adapter for adapter in adapters if isinstance(adapter, Adapter)).items())
