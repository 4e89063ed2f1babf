"""The model as the engine sees it: a plan goes in, drawn tokens come out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from gpu_worker.engine.batch_plan import BatchPlan, DrawnToken, PlannedChunk
from gpu_worker.engine.sequence import Sequence
from gpu_worker.model.config import CheckpointConfig, read_config
from gpu_worker.model.graphs import CardCapture, DecodeGraphs, graph_sizes
from gpu_worker.model.inputs import StepCapacity, StepInputs
from gpu_worker.model.kv_layout import KvCache, KvLayout
from gpu_worker.model.kv_memory import KvNeed, KvSize, cpu_default_bytes, cuda_bytes, size_kv
from gpu_worker.model.llama import Llama, load_llama
from gpu_worker.model.loader import Checkpoint, fingerprint
from gpu_worker.model.qwen2 import load_qwen2
from gpu_worker.sampling.sampler import Sampler
from shared.config import EngineConfig, WorkerConfig
from shared.errors import ConfigError
from shared.ids import RequestId
from shared.logs import get_log
from shared.messages import SamplingParams

_log = get_log("runner")

LOADERS = {"LlamaForCausalLM": load_llama, "Qwen2ForCausalLM": load_qwen2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What a worker tells others about its model. `vocab_size` counts ids that have a token."""

    fingerprint: str
    vocab_size: int
    max_model_len: int
    dtype: str
    device: str


class TorchRunner:
    """A `ModelRunner` on torch. One thread uses it."""

    def __init__(self, model: Llama, cache: KvCache, *, inputs: StepInputs, sampler: Sampler, block_size: int,
                 card: ModelCard, graphs: DecodeGraphs | None = None) -> None:  # fmt: skip
        self._model, self._cache, self._inputs, self._sampler = model, cache, inputs, sampler
        self._block_size, self._graphs = block_size, graphs
        self.card = card

    @property
    def num_blocks(self) -> int:
        """KV blocks; ids 0 .. num_blocks − 1."""
        return self._cache.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._block_size

    @property
    def fingerprint(self) -> str:
        """Names weights and arithmetic."""
        return self.card.fingerprint

    @property
    def vocab_size(self) -> int:
        """Ids that have a token."""
        return self.card.vocab_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.card.max_model_len

    @property
    def dtype(self) -> str:
        """Of weights and KV: float32, bfloat16, float16."""
        return self.card.dtype

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return self.card.device

    def run(self, plan: BatchPlan) -> list[DrawnToken]:
        """Write KV for all tokens of `plan` and draw one token for each sampling chunk, in plan order."""
        if not plan.chunks:
            return []
        with torch.inference_mode():
            logits = self.compute_logits(plan)
            return self._sampler.draw(logits, [chunk.sequence for chunk in plan.chunks if chunk.is_sampling])

    def compute_logits(self, plan: BatchPlan) -> torch.Tensor:
        """Write KV for all tokens of `plan`; raw logits [sampling chunks, model's vocabulary] float32."""
        with torch.inference_mode():
            if self._graphs is not None and (logits := self._graphs.compute_logits(plan)) is not None:
                return logits
            self._inputs.fill(plan)
            hidden = self._model.forward(self._inputs, self._cache)
            return self._model.logits(hidden[self._inputs.wanted_rows])

    def forget(self, sequence: Sequence) -> None:
        """The sequence has left the batch: free its sampling row."""
        with torch.inference_mode():
            self._sampler.forget(sequence)


def load_runner(config: WorkerConfig) -> TorchRunner:
    """The runner that `config` asks for, its weights loaded and its KV cache made. Sets torch's thread count.

    Raises:
        ConfigError: the model folder, a flag or the memory does not allow it.
    """
    engine = config.engine
    if engine.num_threads is not None:
        torch.set_num_threads(engine.num_threads)
    folder, device = Path(config.model.model), _device(engine.device)
    checkpoint_config = read_config(folder)
    dtype_name = _dtype_name(config.model.dtype, checkpoint_config)
    dtype: torch.dtype = getattr(torch, dtype_name)
    model_len = _model_len(config.model.max_model_len, checkpoint_config)
    model = _load_model(checkpoint_config, folder, dtype=dtype, device=device, model_len=model_len)
    layout = KvLayout(
        groups=model.kv_groups,
        block_size=engine.block_size,
        num_kv_heads=checkpoint_config.num_kv_heads,
        head_size=checkpoint_config.head_size,
        dtype=dtype,
    )
    need = KvNeed(layout=layout, wanted_len=config.model.max_model_len, model_len=model_len,
                  max_num_seqs=engine.max_num_seqs)  # fmt: skip
    size = _size_kv(need, config, model, device)
    card = ModelCard(
        fingerprint=fingerprint(folder, dtype_name),
        vocab_size=min(checkpoint_config.vocab_size, _tokenizer_size(folder) or checkpoint_config.vocab_size),
        max_model_len=size.max_model_len,
        dtype=dtype_name,
        device=device.type,
    )
    cache, inputs = layout.allocate(size.num_blocks, device), StepInputs(_capacity(config, size.max_model_len), device)
    return TorchRunner(
        model,
        cache,
        inputs=inputs,
        sampler=Sampler(vocab_size=card.vocab_size, max_num_seqs=engine.max_num_seqs, device=device),
        block_size=engine.block_size,
        card=card,
        graphs=None if device.type != "cuda" or engine.enforce_eager else _capture(model, cache, inputs, size, engine),
    )


def _capture(model: Llama, cache: KvCache, inputs: StepInputs, size: KvSize, engine: EngineConfig) -> DecodeGraphs:
    """The graphs of all decode steps that are not too large."""
    with torch.inference_mode():
        return DecodeGraphs(
            lambda: model.logits(model.forward(inputs, cache)),
            inputs,
            graph_sizes(min(engine.max_num_seqs, engine.max_num_batched_tokens)),
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
        raise ConfigError(f"the checkpoint's dtype {name} is not supported; choose one with --dtype")
    return name


def _model_len(wanted: int | None, config: CheckpointConfig) -> int:
    if wanted is not None and wanted > config.max_position:
        raise ConfigError(f"--max-model-len={wanted}: the model's longest context is {config.max_position}")
    return wanted or config.max_position


def _load_model(
    config: CheckpointConfig, folder: Path, *, dtype: torch.dtype, device: torch.device, model_len: int
) -> Llama:
    checkpoint = Checkpoint(folder, dtype=dtype, device=device)
    with torch.inference_mode():
        model = LOADERS[config.architecture](config, checkpoint, model_len, device)
    checkpoint.close(ignored=("rotary_emb.inv_freq", "lm_head.weight") if config.is_tied else ("rotary_emb.inv_freq",))
    return model


def _tokenizer_size(folder: Path) -> int | None:
    """Ids up to the largest that has a token; None without a tokenizer.json."""
    path = folder / "tokenizer.json"
    return max(Tokenizer.from_file(str(path)).get_vocab().values()) + 1 if path.is_file() else None


def _capacity(config: WorkerConfig, max_model_len: int) -> StepCapacity:
    engine = config.engine
    return StepCapacity(
        max_tokens=engine.max_num_batched_tokens,
        max_sequences=engine.max_num_seqs,
        max_blocks=-(-max_model_len // engine.block_size),
        block_size=engine.block_size,
    )


def _size_kv(need: KvNeed, config: WorkerConfig, model: Llama, device: torch.device) -> KvSize:
    explicit = config.engine.kv_cache_memory_bytes
    if explicit is not None:
        available = explicit
    elif device.type == "cuda":
        available = cuda_bytes(config.engine.gpu_memory_utilization, _profile(need, config, model, device), device)
    else:
        available = cpu_default_bytes()
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
    tokens, block_size = min(config.engine.max_num_batched_tokens, need.model_len), config.engine.block_size
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
    inputs = StepInputs(_capacity(config, need.model_len), device)
    inputs.fill(BatchPlan((PlannedChunk(sequence, 0, tokens, is_sampling=True),)))
    cache = need.layout.allocate(num_blocks, device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        hidden = model.forward(inputs, cache)
        model.logits(hidden[-config.engine.max_num_seqs :])
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return peak - num_blocks * need.layout.block_bytes
