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
from gpu_worker.model.cpu_decoder import CpuDecoder
from gpu_worker.model.llama import Llama
from gpu_worker.model.runner import Decoder
from shared.config import EngineConfig

HELD_PER_SLOT = 4


def adapt(
    model: Decoder, config: CheckpointConfig, engine: EngineConfig, *, dtype: torch.dtype, device: torch.device
) -> LoadedAdapters | None:
    """The adapters of `model`, whose projections read the slots from now on; None without `--enable-lora`."""
    if not engine.enable_lora:
        return None
    targets, num_slots, max_rank = find_targets(config), engine.max_loras, engine.max_lora_rank
    backend: SlotBackend
    if isinstance(model, CpuDecoder):
        backend = slots = CpuSlots(targets, num_slots=num_slots, max_rank=max_rank, dtype=dtype)
        model.adapt(slots)
    else:
        assert isinstance(model, Llama)
        with torch.inference_mode():
            backend = stacked = TorchSlots(targets, num_slots=num_slots, max_rank=max_rank, dtype=dtype, device=device)
        model.adapt(stacked.weights)
    read = partial(read_peft, config, max_rank=max_rank)
    max_held = max(num_slots, engine.max_cpu_loras or HELD_PER_SLOT * num_slots)
    return LoadedAdapters(AdapterStore(max_held, read, backend), AdapterSlots(num_slots, backend))
