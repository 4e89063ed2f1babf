"""From settings to a runner: device and precision, the weights, the way of computing, the size of the KV cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from gpu_worker.engine.chunks import BatchPlan, PlannedChunk
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.swap import HostMemory
from gpu_worker.lora.assembly import adapt
from gpu_worker.model.config import CheckpointConfig
from gpu_worker.model.cpu_kernels import load_cpu_decoder, open_pool
from gpu_worker.model.families import read_config
from gpu_worker.model.graphs import CardCapture, DecodeGraphs, graph_sizes
from gpu_worker.model.host_memory import NUM_STAGED, CardHostMemory, CpuHostMemory, CudaStreams
from gpu_worker.model.inputs import StepCapacity, StepInputs
from gpu_worker.model.kv_layout import KV_DTYPES, KvCache, KvGroup, KvLayout
from gpu_worker.model.kv_memory import KvNeed, KvSize, cpu_default_bytes, cuda_bytes, size_host, size_kv
from gpu_worker.model.llama import Llama, load_llama
from gpu_worker.model.loader import Checkpoint, fingerprint
from gpu_worker.model.quantization import QUANTIZATIONS
from gpu_worker.model.runner import Decoder, DecoderRunner, ModelCard
from gpu_worker.model.vocabulary import tokenizer_size
from gpu_worker.model.weights import ignored_weights
from gpu_worker.model.windows import shared_window, without_idle_windows
from gpu_worker.sampling.sampler import Sampler
from kernels.cpu.choose import Chooser
from kernels.cpu.program import Pool
from shared.capacity import resident_tokens
from shared.config import EngineConfig, WorkerConfig
from shared.errors import ConfigError, shorten
from shared.ids import RequestId
from shared.logs import get_log
from shared.messages import SamplingParams

_log = get_log("runner")


def load_runner(config: WorkerConfig) -> DecoderRunner:
    """The runner that `config` asks for, its weights loaded and its KV cache made. Sets torch's thread count.

    Raises:
        ConfigError: the model folder, a flag or the memory does not allow it.
    """
    engine, folder, device = config.engine, Path(config.model.model), _device(config.engine.device)
    if engine.num_threads is not None:
        torch.set_num_threads(engine.num_threads)
    checkpoint_config, model_len = _read_config(folder, config.model.max_model_len)
    dtype_name = _dtype_name(config.model.dtype, checkpoint_config)
    dtype: torch.dtype = getattr(torch, dtype_name)
    layout = _layout(checkpoint_config, engine, dtype)
    pool = open_pool(config, checkpoint_config, layout, dtype) if device.type == "cpu" else None
    model: Decoder
    if pool is not None:
        layout = replace(layout, is_packed=True)
        model = load_cpu_decoder(checkpoint_config, config, layout, pool, dtype=dtype, model_len=model_len)
    else:
        model = _load_model(checkpoint_config, config, dtype=dtype, device=device, model_len=model_len)
    adapters = adapt(model, checkpoint_config, engine, dtype=dtype, device=device)
    window = shared_window(checkpoint_config) or 0
    size = _size_kv(_need(config, layout, window, model_len), config, model, device)
    arithmetic = _arithmetic(config, dtype_name, layout.dtype, pool) + _rope_choice(checkpoint_config, model_len)
    card = ModelCard(
        fingerprint=fingerprint(folder, arithmetic),
        vocab_size=min(checkpoint_config.vocab_size, tokenizer_size(folder) or checkpoint_config.vocab_size),
        max_model_len=size.max_model_len,
        dtype=dtype_name,
        device=device.type,
        key_cost=_key_cost(checkpoint_config),
        window=window,
    )
    capacity, cache = _capacity(config, size.max_model_len), layout.allocate(size.num_blocks, device)
    inputs = StepInputs(capacity, device)
    return DecoderRunner(
        model,
        cache,
        inputs=inputs,
        sampler=Sampler(
            vocab_size=card.vocab_size,
            max_num_seqs=engine.max_num_seqs,
            device=device,
            chooser=None if pool is None else Chooser(pool, capacity.max_wanted),
        ),
        card=card,
        graphs=_capture(model, cache, inputs, size, engine) if isinstance(model, Llama) else None,
        host_memory=_host_memory(layout, cache, engine.swap_bytes),
        adapters=adapters,
    )


def _read_config(folder: Path, wanted_len: int | None) -> tuple[CheckpointConfig, int]:
    """The checkpoint's config, with the windows that count for texts of the second, the longest one in tokens."""
    config = read_config(folder)
    model_len = _model_len(wanted_len, config)
    return without_idle_windows(config, model_len), model_len


def _need(config: WorkerConfig, layout: KvLayout, window: int, model_len: int) -> KvNeed:
    engine = config.engine
    kept = engine.kept_window(window)
    if kept and engine.swap_bytes:
        raise ConfigError(f"--swap-space={engine.swap_space}: not for a model that frees blocks before its window of "
                          f"{window} tokens; set 0")  # fmt: skip
    return KvNeed(
        layout=layout,
        wanted_len=config.model.max_model_len,
        model_len=model_len,
        max_num_seqs=engine.max_num_seqs,
        num_resident=resident_tokens(kept, engine.step_tokens(model_len)),
    )


def _layout(config: CheckpointConfig, engine: EngineConfig, dtype: torch.dtype) -> KvLayout:
    """Token-major, one group of all layers. `dtype`: of the model."""
    kept = engine.kv_cache_dtype
    return KvLayout(
        groups=(KvGroup(layers=range(config.num_layers), window=shared_window(config)),),
        block_size=engine.block_size,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        dtype=dtype if kept == "auto" else KV_DTYPES[kept],
    )


def _host_memory(layout: KvLayout, cache: KvCache, swap_bytes: int) -> HostMemory | None:
    """`--swap-space`; None: there is none."""
    if not swap_bytes:
        return None
    is_card, cache_bytes = cache.device.type == "cuda", cache.num_blocks * cache.block_bytes
    num_blocks = size_host(swap_bytes, layout, cache_bytes=0 if is_card else cache_bytes)
    host = layout.allocate_host(num_blocks, is_pinned=is_card)
    _log.info("swap.sized", tokens=num_blocks * layout.block_size, blocks=num_blocks, mib=host.nbytes / 2**20)
    return CardHostMemory(cache, host, CudaStreams()) if is_card else CpuHostMemory(cache, host)


def _capture(
    model: Llama, cache: KvCache, inputs: StepInputs, size: KvSize, engine: EngineConfig
) -> DecodeGraphs | None:
    """The graphs of all decode steps that are not too large; None where there are no graphs or none are wanted."""
    if cache.device.type != "cuda" or engine.enforce_eager:
        return None
    if not model.has_fixed_shapes:
        _log.info("graphs.off", why="how many rows each expert gets is known to the card only")
        return None
    with torch.inference_mode():
        return DecodeGraphs(
            lambda: model.logits(model.forward(inputs, cache)),
            inputs,
            graph_sizes(min(engine.max_num_seqs, engine.step_tokens(size.max_model_len))),
            max_context=size.max_model_len,
            max_total_context=size.num_tokens,
            capture=CardCapture(),
        )


def _device(wanted: str) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device=cuda: torch finds no CUDA device; use --device=cpu, or a CUDA build of torch")
    return torch.device(wanted)


def _dtype_name(wanted: str, config: CheckpointConfig) -> str:
    name = config.dtype if wanted == "auto" else wanted
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"the checkpoint's dtype {shorten(name)} is not supported; choose one with --dtype")
    return name


def _model_len(wanted: int | None, config: CheckpointConfig) -> int:
    if wanted is not None and wanted > config.longest_len:
        raise ConfigError(f"--max-model-len={wanted}: the model's longest context is {config.longest_len}")
    return wanted or config.max_position


def _rope_choice(config: CheckpointConfig, model_len: int) -> str:
    """What of the rotary embedding follows from `model_len`, for the fingerprint; logged. Empty: nothing."""
    choices = [choice for rope in config.distinct_ropes if (choice := rope.choice(model_len))]
    if choices:
        _log.info("rope.chosen", frequencies=", ".join(choices), by=f"--max-model-len={model_len}",
                  trained_on=max(rope.original_len for rope in config.distinct_ropes))  # fmt: skip
    return "".join(f" rope {choice}" for choice in choices)


def _load_model(
    checkpoint_config: CheckpointConfig, config: WorkerConfig, *, dtype: torch.dtype, device: torch.device,
    model_len: int,
) -> Llama:  # fmt: skip
    if checkpoint_config.attention_softcap is not None and device.type != "cpu":
        family = checkpoint_config.architecture
        raise ConfigError(f"--device=cuda: {family} softcaps attention's scores, which is built for --device=cpu only")
    if config.model.quantization != "none" and device.type != "cpu":
        raise ConfigError(f"--quantization={config.model.quantization} is for --device=cpu in this version")
    checkpoint = Checkpoint(Path(config.model.model), dtype=dtype, device=device)
    quantization = QUANTIZATIONS[config.model.quantization]
    with torch.inference_mode():
        model = load_llama(checkpoint_config, checkpoint, model_len, device, quantization)
    checkpoint.close(ignored=ignored_weights(checkpoint_config))
    return model


def _arithmetic(config: WorkerConfig, dtype: str, kv_dtype: torch.dtype, pool: Pool | None) -> str:
    """A name that is the same where results are, of requests with adapters, too: only some workers have them."""
    way = "torch" if pool is None else f"cpu kernels {pool.isa.value}"
    adapted = " adapters" if config.engine.enable_lora else ""
    return f"{dtype} {config.model.quantization} {way} kv {str(kv_dtype).removeprefix('torch.')}{adapted}"


def _key_cost(config: CheckpointConfig) -> float:
    """Multiplications of a (query, key) pair over those of a token's linears, the head not counted."""
    q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    sizes = [
        config.intermediate_size if experts is None else experts.num_used * experts.size
        for experts in config.experts or (None,)
    ]
    per_size = config.hidden_size * 3
    return 2 * q_size / (config.hidden_size * (2 * q_size + 2 * kv_size) + per_size * sum(sizes) / len(sizes))


def _capacity(config: WorkerConfig, max_model_len: int) -> StepCapacity:
    engine, speculation = config.engine, config.engine.speculation()
    num_draws = 1 if speculation is None else 1 + speculation.num_tokens
    max_tokens = engine.step_tokens(max_model_len)
    return StepCapacity(
        max_tokens=max_tokens,
        max_sequences=engine.max_num_seqs,
        max_wanted=min(engine.max_num_seqs * num_draws, max(engine.max_num_seqs, max_tokens)),
        max_blocks=-(-max_model_len // engine.block_size),
        block_size=engine.block_size,
        max_loras=engine.max_loras if engine.enable_lora else 0,
    )


def _size_kv(need: KvNeed, config: WorkerConfig, model: Decoder, device: torch.device) -> KvSize:
    explicit = config.engine.kv_cache_memory_bytes
    if explicit is not None:
        available = explicit
    elif device.type == "cuda":
        assert isinstance(model, Llama)
        available = cuda_bytes(config.engine.gpu_memory_utilization, _profile(need, config, model, device), device)
        available -= 2 * NUM_STAGED * need.layout.block_bytes if config.engine.swap_bytes else 0
    else:
        available = cpu_default_bytes(config.engine.memory_shares)
    size = size_kv(need, available, is_explicit=explicit is not None)
    if size.max_model_len < need.model_len:
        _log.warning("context.lowered", max_model_len=size.max_model_len,
                     model_allows=need.model_len, remedy="--kv-cache-memory-bytes")  # fmt: skip
    _log.info("cache.sized", tokens=size.num_tokens, blocks=size.num_blocks, block_size=size.block_size,
             mib=size.num_blocks * need.layout.block_bytes / 2**20, max_model_len=size.max_model_len,
             full_length_requests=size.num_full_requests)  # fmt: skip
    return size


def _profile(need: KvNeed, config: WorkerConfig, model: Llama, device: torch.device) -> int:
    """The most CUDA memory that a step of full size takes beside the KV cache, weights included; bytes."""
    tokens, block_size = min(config.engine.step_tokens(need.model_len), need.model_len), config.engine.block_size
    num_blocks = -(-tokens // block_size)
    sequence = Sequence(
        request_id=RequestId("profile"),
        attempt=0,
        choice=0,
        rank=0,
        token_ids=[0] * tokens,
        num_prompt_tokens=tokens,
        sampling=SamplingParams(seed=0, max_tokens=1),
    )
    sequence.block_ids = list(range(num_blocks))
    capacity = _capacity(config, need.model_len)
    inputs = StepInputs(capacity, device)
    inputs.fill(BatchPlan((PlannedChunk(sequence, 0, tokens, is_sampling=True),)))
    inputs.send()
    cache = need.layout.allocate(num_blocks, device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        hidden = model.forward(inputs, cache)
        model.logits(hidden[-capacity.max_wanted :])
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return peak - num_blocks * need.layout.block_bytes
