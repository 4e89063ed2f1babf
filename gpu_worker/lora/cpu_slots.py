"""The slots of adapters for the CPU kernels: addresses of packed factors, which stay where they are."""

from __future__ import annotations

from typing import cast

import torch

from gpu_worker.lora.peft_weights import Parts
from gpu_worker.lora.targets import Key, Target
from kernels.cpu.lora import LoraShape, LoraSlots, PackedFactors, pack_factors


class CpuSlots:
    """A `SlotBackend` over `LoraSlots` for each projection.

    Args:
        dtype: of the model; factors are kept in it.
    """

    def __init__(self, targets: dict[Key, Target], *, num_slots: int, max_rank: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.shapes = {
            key: LoraShape(target.in_features, target.parts, is_interleaved=key[1] == "gate_up")
            for key, target in targets.items()
        }
        self.slots = {key: LoraSlots(num_slots) for key in targets}
        self.shrunk_width = max(shape.shrunk_width(max_rank) for shape in self.shapes.values())

    def prepare(self, factors: dict[Key, Parts]) -> object:
        return {key: pack_factors(self.shapes[key], parts, self.dtype) for key, parts in factors.items()}

    def put(self, slot: int, prepared: object) -> None:
        factors = cast("dict[Key, PackedFactors | None]", prepared)
        for key, slots in self.slots.items():
            slots.put(slot, factors.get(key))
