"""Who computes a model: the CPU kernels, torch over our own layers, or the code of transformers; and its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpu_worker.lora.assembly import adapt
from gpu_worker.lora.loaded import LoadedAdapters
from gpu_worker.model.config import CheckpointConfig
from gpu_worker.model.cpu_kernels import load_cpu_decoder, open_pool
from gpu_worker.model.kv_layout import KvLayout
from gpu_worker.model.llama import Llama, load_llama
from gpu_worker.model.loader import Checkpoint
from gpu_worker.model.quantization import QUANTIZATIONS
from gpu_worker.model.runner import Decoder
from gpu_worker.model.split import WHOLE, Split
from gpu_worker.model.transformers_config import foreign_version
from gpu_worker.model.transformers_decoder import load_transformers
from gpu_worker.model.weights import ignored_weights
from kernels.cpu.program import Pool
from shared.config import WorkerConfig
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What a model is computed with: numbers of `dtype` on `device`, for texts of up to `model_len` tokens. `split`:
    this rank's part of it."""

    dtype: torch.dtype
    device: torch.device
    model_len: int
    split: Split = WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDecoder:
    """A model with its weights.

    Attributes:
        way: a name of who computes it.
        layout: of the cache that it reads.
        pool: the threads of the CPU kernels; None: it does without.
        adapters: what rows may have; None: nothing.
    """

    model: Decoder
    way: str
    layout: KvLayout
    pool: Pool | None = None
    adapters: LoadedAdapters | None = None


def load_decoder(
    checkpoint_config: CheckpointConfig, config: WorkerConfig, layout: KvLayout, placement: Placement
) -> LoadedDecoder:
    """The model of `config`, or this rank's part of it. `layout`: of this rank's cache.

    Raises:
        ConfigError: the checkpoint, a flag or the machine does not allow it.
    """
    dtype, device = placement.dtype, placement.device
    _refuse_for_device(config, device)
    if config.engine.enable_lora and checkpoint_config.is_foreign:
        family = checkpoint_config.architecture
        raise ConfigError(f"--enable-lora: adapters are for quire's own model families; transformers computes {family}")
    can_have_pool = device.type == "cpu" and placement.split.rank == 0  # the first rank says why there is none
    pool = open_pool(config, checkpoint_config, layout) if can_have_pool else None
    if pool is not None:
        layout = replace(layout, is_packed=True)
        cpu = load_cpu_decoder(checkpoint_config, config, layout, pool, dtype=dtype,
                               model_len=placement.model_len)  # fmt: skip
        adapters = adapt(cpu, checkpoint_config, config.engine, dtype=dtype, device=device)
        way = f"cpu kernels {pool.isa.value}"
        return LoadedDecoder(model=cpu, way=way, layout=layout, pool=pool, adapters=adapters)
    if checkpoint_config.is_foreign:
        quantization = QUANTIZATIONS[config.model.quantization]
        foreign = load_transformers(checkpoint_config, Path(config.model.model), dtype=dtype, device=device,
                                    quantization=quantization, layout=layout)  # fmt: skip
        return LoadedDecoder(model=foreign, way=f"transformers {foreign_version()}", layout=layout)
    model = _load_own(checkpoint_config, config, placement)
    adapters = adapt(model, checkpoint_config, config.engine, dtype=dtype, device=device)
    return LoadedDecoder(model=model, way="torch", layout=layout, adapters=adapters)


def _refuse_for_device(config: WorkerConfig, device: torch.device) -> None:
    if config.model.quantization != "none" and device.type != "cpu":
        raise ConfigError(f"--quantization={config.model.quantization} is for --device=cpu in this version")


def _load_own(checkpoint_config: CheckpointConfig, config: WorkerConfig, placement: Placement) -> Llama:
    device = placement.device
    checkpoint = Checkpoint(Path(config.model.model), dtype=placement.dtype, device=device)
    with torch.inference_mode():
        quantization = QUANTIZATIONS[config.model.quantization]
        model = load_llama(
            checkpoint_config, checkpoint, placement.model_len, device, quantization, split=placement.split
        )
    checkpoint.close(ignored=ignored_weights(checkpoint_config))
    return model
