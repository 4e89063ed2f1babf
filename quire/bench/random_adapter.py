"""Adapters of random factors, of all projections of a model: what they cost does not depend on their numbers."""

from __future__ import annotations

from pathlib import Path

import torch

from gpu_worker.lora.adapter import Adapter
from gpu_worker.lora.peft_weights import Parts
from gpu_worker.lora.targets import Key, find_targets
from gpu_worker.model.families import read_config
from gpu_worker.model.runner import DecoderRunner


def add_random_adapters(runner: DecoderRunner, folder: Path, count: int, rank: int) -> list[Adapter]:
    """`count` adapters of `rank` in the store of `runner`, which has the model in `folder`."""
    assert runner.adapters is not None
    targets, store = find_targets(read_config(folder)), runner.adapters.store
    adapters = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        factors: dict[Key, Parts] = {
            key: tuple(
                (torch.randn(rank, target.in_features, generator=generator) * 0.01,
                 torch.randn(size, rank, generator=generator) * 0.01)
                for size in target.parts
            )
            for key, target in targets.items()
        }  # fmt: skip
        adapters.append(store.take(f"random-{seed}", factors))
    return adapters
