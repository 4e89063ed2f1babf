"""From settings to a runner: device and precision, the weights, the way of computing, the size of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpu_worker.engine.chunks import BatchPlan, PlannedChunk
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.swap import HostMemory
from gpu_worker.model.config import CheckpointConfig
from gpu_worker.model.decoders import LoadedDecoder, Placement, load_decoder
from gpu_worker.model.families import read_config
from gpu_worker.model.graphs import CardCapture, DecodeGraphs, graph_sizes
from gpu_worker.model.host_memory import NUM_STAGED, CardHostMemory, CpuHostMemory, CudaStreams
from gpu_worker.model.inputs import StepCapacity, StepInputs
from gpu_worker.model.kv_layout import KV_DTYPES, KvCache, KvGroup, KvLayout
from gpu_worker.model.kv_memory import KvNeed, KvSize, cpu_default_bytes, cuda_bytes, size_host, size_kv
from gpu_worker.model.llama import Llama
from gpu_worker.model.loader import fingerprint
from gpu_worker.model.runner import Decoder, DecoderRunner, ModelCard
from gpu_worker.model.split import WHOLE, Split
from gpu_worker.model.vocabulary import tokenizer_size
from gpu_worker.model.windows import shared_window, without_idle_windows
from gpu_worker.quant.scheme import refuse_other_quantization
from gpu_worker.sampling.sampler import Sampler
from kernels.cpu.choose import Chooser
from shared.capacity import resident_tokens
from shared.config import EngineConfig, WorkerConfig
from shared.errors import ConfigError, shorten
from shared.ids import RequestId
from shared.logs import get_log
from shared.messages import SamplingParams

_log = get_log("runner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What computes steps: of a worker of several ranks, each has its own."""

    decoder: LoadedDecoder
    cache: KvCache
    inputs: StepInputs
    host_memory: HostMemory | None
    size: KvSize
    card: ModelCard


def load_runner(config: WorkerConfig) -> DecoderRunner:
    """The runner that `config` asks for, its weights loaded and its KV cache made. Sets torch's thread count.

    Raises:
        ConfigError: the model folder, a flag or the memory does not allow it.
    """
    if config.engine.tensor_parallel_size > 1:
        raise ConfigError(f"--tensor-parallel-size={config.engine.tensor_parallel_size}: only workers have several "
                          "ranks; this command computes in one process: leave it out")  # fmt: skip
    return make_runner(load_parts(config), config.engine)


def make_runner(parts: Parts, engine: EngineConfig) -> DecoderRunner:
    """A runner over `parts`."""
    decoder, capacity = parts.decoder, parts.inputs.capacity
    return DecoderRunner(
        decoder.model,
        parts.cache,
        inputs=parts.inputs,
        sampler=Sampler(
            vocab_size=parts.card.vocab_size,
            max_num_seqs=engine.max_num_seqs,
            device=parts.cache.device,
            chooser=None if decoder.pool is None else Chooser(decoder.pool, capacity.max_wanted),
        ),
        card=parts.card,
        graphs=_capture(parts, engine),
        host_memory=parts.host_memory,
        adapters=decoder.adapters,
    )


def load_parts(config: WorkerConfig, split: Split = WHOLE) -> Parts:
    """What computes the steps of a worker, or a rank's part of them. Sets torch's thread count.

    Raises:
        ConfigError: the model folder, a flag or the memory does not allow it.
    """
    engine = config.engine
    if engine.num_threads is not None or split.size > 1:
        torch.set_num_threads(engine.num_threads or max(1, torch.get_num_threads() // split.size))
    folder, device = Path(config.model.model), find_device(engine.device)
    checkpoint_config, model_len = _read_config(folder, config)
    refuse_other_quantization(config.model.quantization, checkpoint_config.scheme, device.type)
    dtype_name, engine = _widen_half(_dtype_name(config.model.dtype, checkpoint_config), engine, device)
    dtype: torch.dtype = getattr(torch, dtype_name)
    layout = _layout(split.own(checkpoint_config), engine, dtype)
    placement = Placement(dtype=dtype, device=device, model_len=model_len, split=split)
    decoder = load_decoder(checkpoint_config, config, layout, placement)
    layout = decoder.layout
    window = shared_window(checkpoint_config) or 0
    size = _size_kv(_need(config, layout, window, model_len), config, decoder.model, placement)
    vocab_size = _vocab_size(config, checkpoint_config)
    arithmetic = _arithmetic(config, dtype_name, layout.dtype, decoder.way) + _rope_choice(checkpoint_config, model_len)
    card = ModelCard(
        fingerprint=fingerprint(folder, f"{arithmetic} {vocab_size} ids"),
        vocab_size=vocab_size,
        max_model_len=size.max_model_len,
        dtype=dtype_name,
        device=device.type,
        key_cost=_key_cost(checkpoint_config),
        window=window,
        quantization=config.model.quantization if checkpoint_config.scheme is None else checkpoint_config.scheme.method,
    )
    cache = layout.allocate(size.num_blocks, device)
    return Parts(
        decoder=decoder,
        cache=cache,
        inputs=StepInputs(_capacity(config, size.max_model_len), device),
        host_memory=_host_memory(layout, cache, engine),
        size=size,
        card=card,
    )


def _read_config(folder: Path, config: WorkerConfig) -> tuple[CheckpointConfig, int]:
    """The checkpoint's config, with the windows that count for texts of the second, the longest one in tokens."""
    found = read_config(folder, config.model.model_impl)
    model_len = _model_len(config.model.max_model_len, found)
    return without_idle_windows(found, model_len), model_len


def _vocab_size(config: WorkerConfig, checkpoint_config: CheckpointConfig) -> int:
    """Ids that may be drawn: those of the model's rows that the tokenizer has a token for."""
    known = tokenizer_size(config.model.files().path("tokenizer.json"))
    return checkpoint_config.vocab_size if known is None else min(checkpoint_config.vocab_size, known)


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
        num_ranks=engine.tensor_parallel_size,
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


def _host_memory(layout: KvLayout, cache: KvCache, engine: EngineConfig) -> HostMemory | None:
    """`--swap-space`, this rank's part of it; None: there is none."""
    if not engine.swap_bytes:
        return None
    is_card, num_ranks = cache.device.type == "cuda", engine.tensor_parallel_size
    cache_bytes = 0 if is_card else cache.num_blocks * cache.block_bytes * num_ranks
    num_blocks = size_host(engine.swap_bytes, layout, cache_bytes=cache_bytes, num_ranks=num_ranks)
    host = layout.allocate_host(num_blocks, is_pinned=is_card)
    _log.info("swap.sized", tokens=num_blocks * layout.block_size, blocks=num_blocks, mib=host.nbytes / 2**20)
    return CardHostMemory(cache, host, CudaStreams()) if is_card else CpuHostMemory(cache, host)


def _capture(parts: Parts, engine: EngineConfig) -> DecodeGraphs | None:
    """The graphs of all decode steps that are not too large; None where there are no graphs or none are wanted."""
    model, cache, inputs, size = parts.decoder.model, parts.cache, parts.inputs, parts.size
    if cache.device.type != "cuda" or engine.enforce_eager:
        return None
    if not isinstance(model, Llama):
        why = "several ranks compute a step" if engine.tensor_parallel_size > 1 else f"{parts.decoder.way} computes it"
        _log.info("graphs.off", why=why)
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


def find_device(wanted: str) -> torch.device:
    """What `--device` stands for here. Raises `ConfigError`."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device=cuda: torch finds no CUDA device; use --device=cpu, or a CUDA build of torch")
    return torch.device(wanted)


def _dtype_name(wanted: str, config: CheckpointConfig) -> str:
    name = config.dtype if wanted == "auto" else wanted
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"the checkpoint's dtype {shorten(name)} is not supported; choose one with --dtype")
    if wanted == "auto" and name == "float16" and config.scheme is not None:  # of which the CPU kernels have none
        _log.warning("dtype.chosen", dtype="bfloat16", why="a quantized checkpoint of float16 on a CPU")
        return "bfloat16"
    return name


def _widen_half(dtype_name: str, engine: EngineConfig, device: torch.device) -> tuple[str, EngineConfig]:
    """On a CPU both with float32 in place of float16, which it hardly computes with; a warning if either had it.
    float32 holds each float16 number exactly, bfloat16 cuts three bits off its fraction."""
    if device.type != "cpu":
        return dtype_name, engine
    asked = {}
    if dtype_name == "float16":
        asked["dtype"], dtype_name = dtype_name, "float32"
    if KV_DTYPES.get(engine.kv_cache_dtype) is torch.float16:
        asked["kv_cache_dtype"], engine = engine.kv_cache_dtype, replace(engine, kv_cache_dtype="float32")
    if asked:
        _log.warning(
            "half.widened", **asked, instead="float32", why="CPUs compute it faster, and it holds the same numbers"
        )
    return dtype_name, engine


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


def _arithmetic(config: WorkerConfig, dtype: str, kv_dtype: torch.dtype, way: str) -> str:
    """A name that is the same where results are, of requests with adapters, too: only some workers have them."""
    adapted = " adapters" if config.engine.enable_lora else ""
    ranks = "" if (size := config.engine.tensor_parallel_size) == 1 else f" ranks {size}"
    return f"{dtype} {config.model.quantization} {way} kv {str(kv_dtype).removeprefix('torch.')}{adapted}{ranks}"


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


def _size_kv(need: KvNeed, config: WorkerConfig, model: Decoder, placement: Placement) -> KvSize:
    """The size of the cache, the same on all ranks: what the one with the least memory has room for."""
    device, split = placement.device, placement.split
    explicit = config.engine.kv_cache_memory_bytes
    if explicit is not None:
        available = explicit
    elif device.type == "cuda":
        available = cuda_bytes(config.engine.gpu_memory_utilization, _profile(need, config, model, device), device)
        available -= 2 * NUM_STAGED * need.layout.block_bytes if config.engine.swap_bytes else 0
        available = split.size * split.least(available)
    else:
        available = split.least(cpu_default_bytes(config.engine.memory_shares))
    size = size_kv(need, available, is_explicit=explicit is not None)
    if size.max_model_len < need.model_len:
        _log.warning("context.lowered", max_model_len=size.max_model_len,
                     model_allows=need.model_len, remedy="--kv-cache-memory-bytes")  # fmt: skip
    _log.info("cache.sized", tokens=size.num_tokens, blocks=size.num_blocks, block_size=size.block_size,
             mib=size.num_blocks * need.block_bytes / 2**20, max_model_len=size.max_model_len,
             full_length_requests=size.num_full_requests)  # fmt: skip
    return size


def _profile(need: KvNeed, config: WorkerConfig, model: Decoder, device: torch.device) -> int:
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
    inputs.wanted_rows = torch.arange(tokens, device=device)[-capacity.max_wanted :]
    cache = need.layout.allocate(num_blocks, device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        model.start_logits(inputs, cache)()
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return peak - num_blocks * need.layout.block_bytes
