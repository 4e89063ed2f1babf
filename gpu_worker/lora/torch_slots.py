"""The slots of adapters for torch: stacked factors of each projection, on the model's device."""

from __future__ import annotations

from typing import cast

import torch

from gpu_worker.lora.peft_weights import Parts
from gpu_worker.lora.targets import Key, Target
from kernels.lora_matmul import LoraWeight


class TorchSlots:
    """A `SlotBackend` over a `LoraWeight` for each projection, made here for `num_slots` adapters of `max_rank`."""

    def __init__(
        self, targets: dict[Key, Target], *, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._dtype, self._max_rank = dtype, max_rank
        self.weights = {
            key: LoraWeight(
                torch.zeros(num_slots, len(target.parts) * max_rank, target.in_features, dtype=dtype, device=device),
                torch.zeros(num_slots, sum(target.parts), max_rank, dtype=dtype, device=device),
                tuple(sum(target.parts[: i + 1]) for i in range(len(target.parts))),
                [0] * num_slots,
            )
            for key, target in targets.items()
        }

    def prepare(self, factors: dict[Key, Parts]) -> object:
        return {
            key: tuple(None if part is None else (part[0].to(self._dtype), part[1].to(self._dtype)) for part in parts)
            for key, parts in factors.items()
        }

    def put(self, slot: int, prepared: object) -> None:
        factors = cast("dict[Key, Parts]", prepared)
        for key, weight in self.weights.items():
            parts: Parts = factors.get(key, ())
            weight.a[slot].zero_()
            weight.b[slot].zero_()
            weight.ranks[slot] = max((len(part[0]) for part in parts if part is not None), default=0)
            starts = (0, *weight.ends)
            for index, part in enumerate(parts):
                if part is not None:
                    rank, first = len(part[0]), index * self._max_rank
                    weight.a[slot, first : first + rank] = part[0].to(weight.a.device)
                    weight.b[slot, starts[index] : weight.ends[index], :rank] = part[1].to(weight.b.device)
