"""Whether the CPU kernels can compute a model, and the decoder that does.

`--cpu-kernels auto` falls back to torch with one line that says why; `on` makes that an error; `off` never tries.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

import torch

from gpu_worker.model.config import CheckpointConfig
from gpu_worker.model.cpu_decoder import CpuDecoder
from gpu_worker.model.kv_layout import KvLayout
from gpu_worker.model.loader import Checkpoint, fingerprint
from gpu_worker.model.packed_weights import FORMAT, PackedModel, load_packed, pack_model, save_packed
from gpu_worker.model.quantization import QUANTIZATIONS
from gpu_worker.model.rope import rotary_table
from gpu_worker.model.weights import ignored_weights
from kernels.cpu.build import CpuKernelsUnavailable, Isa, best_isa, load_library
from kernels.cpu.program import Pool
from shared.config import WorkerConfig
from shared.errors import ConfigError
from shared.logs import get_log
from shared.paths import cache_folder

MIN_KEPT_BYTES = 64 << 20
"""Smaller models are packed anew at each start: that takes a fraction of a second."""

_log = get_log("cpu_kernels")


def open_pool(config: WorkerConfig, checkpoint_config: CheckpointConfig, layout: KvLayout) -> Pool | None:
    """Threads for the CPU kernels; None where torch computes.

    Raises:
        ConfigError: `--cpu-kernels=on` or a `--cpu-isa`, and this machine or model does not allow them.
    """
    wanted, isa = config.engine.cpu_kernels, config.engine.cpu_isa
    if wanted == "off" or (checkpoint_config.is_foreign and (wanted, isa) == ("auto", "auto")):
        return None
    try:
        if (num_ranks := config.engine.tensor_parallel_size) > 1:
            raise CpuKernelsUnavailable(f"--tensor-parallel-size={num_ranks}; the CPU kernels are for one rank")
        _refuse_what_torch_must(checkpoint_config)
        layout.kv_shape  # noqa: B018 - raises for what the kernels don't have
        library = _load_best(config) if isa == "auto" else load_library(_cache_folder(config), Isa(isa), _announce)
        return Pool(library, num_threads(config))
    except CpuKernelsUnavailable as error:
        if isa != "auto":
            raise ConfigError(f"--cpu-isa={isa}: {error}") from None
        if wanted == "on":
            raise ConfigError(f"--cpu-kernels=on: {error}") from None
        _log.warning("kernels.unavailable", why=error, instead="torch")
        return None


def _refuse_what_torch_must(config: CheckpointConfig) -> None:
    """Raise `CpuKernelsUnavailable` for a model that the CPU kernels do not compute."""
    lacks = {
        "the code of transformers": config.is_foreign,
        "softcaps": config.attention_softcap is not None or config.logit_softcap is not None,
    }
    if any(lacks.values()):
        wanted = ", ".join(name for name, is_wanted in lacks.items() if is_wanted)
        raise CpuKernelsUnavailable(f"{config.architecture} has {wanted}; the CPU kernels have not")


def _load_best(config: WorkerConfig) -> ctypes.CDLL:
    """Of the best instruction set here; a compiler may be too old for the newest."""
    best = best_isa()
    try:
        return load_library(_cache_folder(config), best, _announce)
    except CpuKernelsUnavailable as error:
        if best is Isa.AVX2:
            raise
        _log.warning("kernels.unavailable", why=error, instead=Isa.AVX2.value)
        return load_library(_cache_folder(config), Isa.AVX2, _announce)


def _announce() -> None:
    _log.info("kernels.compiling", takes="about 10 s, once")


def num_threads(config: WorkerConfig) -> int:
    """Threads that compute: as set, or one for each core that this process may use."""
    return config.engine.num_threads or len(os.sched_getaffinity(0))


def load_cpu_decoder(
    checkpoint_config: CheckpointConfig, config: WorkerConfig, layout: KvLayout, pool: Pool, *, dtype: torch.dtype,
    model_len: int,
) -> CpuDecoder:  # fmt: skip
    """The model of `dtype` on the CPU kernels, its weights from the cache folder if they were packed before.

    Raises:
        ConfigError: the checkpoint does not allow it.
    """
    with torch.inference_mode():
        weights = _load_weights(checkpoint_config, config, dtype)
        cos_sin = [
            rotary_table(rope, checkpoint_config.head_size, model_len, torch.device("cpu"))
            for rope in checkpoint_config.distinct_ropes
        ]
    return CpuDecoder(checkpoint_config, weights, pool, cos_sin=cos_sin, kv=layout.kv_shape, dtype=dtype)


def _load_weights(checkpoint_config: CheckpointConfig, config: WorkerConfig, dtype: torch.dtype) -> PackedModel:
    folder = Path(config.model.model)
    precision = str(dtype).removeprefix("torch.")
    if config.model.quantization != "none":
        precision += f"-{config.model.quantization}"
    name = f"{folder.resolve().name}-{fingerprint(folder, precision)}-{precision}-{FORMAT}.safetensors"
    path = _cache_folder(config) / "packed" / name
    since = time.monotonic()
    weights = load_packed(checkpoint_config, path)
    if weights is not None:
        _log.info("weights.read", seconds=time.monotonic() - since, mib=weights.num_bytes / 2**20)
        return weights
    checkpoint = Checkpoint(folder, dtype=dtype, device=torch.device("cpu"))
    weights = pack_model(checkpoint_config, checkpoint, QUANTIZATIONS[config.model.quantization])
    checkpoint.close(ignored=ignored_weights(checkpoint_config))
    _log.info("weights.packed", seconds=time.monotonic() - since, mib=weights.num_bytes / 2**20)
    if weights.num_bytes >= MIN_KEPT_BYTES:
        save_packed(weights, path)
    return weights


def _cache_folder(config: WorkerConfig) -> Path:
    return cache_folder(config.engine.cache_dir)
