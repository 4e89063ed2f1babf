"""From settings to the adapters of a model."""

from __future__ import annotations

from functools import partial

import torch

from gpu_worker.lora.adapter import AdapterSlots, AdapterStore, SlotBackend
from gpu_worker.lora.cpu_slots import CpuSlots
from gpu_worker.lora.loaded import LoadedAdapters
from gpu_worker.lora.peft_weights import read_peft
from gpu_worker.lora.targets import find_targets
from gpu_worker.lora.torch_slots import TorchSlots
from gpu_worker.model.config import CheckpointConfig
from gpu_worker.model.llama import Llama
from shared.config import EngineConfig

HELD_PER_SLOT = 4


def cpu_adapters(
    config: CheckpointConfig, engine: EngineConfig, dtype: torch.dtype
) -> tuple[CpuSlots | None, LoadedAdapters | None]:
    """The slots for the CPU kernels, and what fills them; None without `--enable-lora`."""
    if not engine.enable_lora:
        return None, None
    slots = CpuSlots(find_targets(config), num_slots=engine.max_loras, max_rank=engine.max_lora_rank, dtype=dtype)
    return slots, _make(config, engine, slots)


def torch_adapters(
    config: CheckpointConfig, engine: EngineConfig, model: Llama, *, dtype: torch.dtype, device: torch.device
) -> LoadedAdapters | None:
    """The slots of `model`, whose projections read them from now on, and what fills them; None without
    `--enable-lora`."""
    if not engine.enable_lora:
        return None
    with torch.inference_mode():
        slots = TorchSlots(
            find_targets(config), num_slots=engine.max_loras, max_rank=engine.max_lora_rank, dtype=dtype, device=device
        )
    model.adapt(slots.weights)
    return _make(config, engine, slots)


def _make(config: CheckpointConfig, engine: EngineConfig, backend: SlotBackend) -> LoadedAdapters:
    read = partial(read_peft, config, max_rank=engine.max_lora_rank)
    max_held = max(engine.max_loras, engine.max_cpu_loras or HELD_PER_SLOT * engine.max_loras)
    return LoadedAdapters(AdapterStore(max_held, read, backend), AdapterSlots(engine.max_loras, backend))
