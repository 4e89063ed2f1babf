"""A decoder whose forward is the code of `transformers`, over our paged KV cache.

`transformers` looks up attention by name in a registry; ours is `ATTENTION`. A step is one row of tokens with their own
positions, chunk after chunk, and no mask: the attention writes the row's keys and values into the cache and reads all
of each sequence by its block table, so that chunks, prefixes, windows, swap and quantized KV are as in every other
model. Projections are our `Linear`, as in the families' own files.

What the model's code asks of attention is checked once, on a token, when it is loaded: each layer calls it once, in
order, with keys of the shape that the cache has, and with no narrower window than the layer's blocks are kept for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpu_worker.model.config import CheckpointConfig
from gpu_worker.model.config_reader import open_config
from gpu_worker.model.inputs import StepInputs
from gpu_worker.model.kv_layout import KvCache, KvLayout
from gpu_worker.model.layers import Linear
from gpu_worker.model.loader import weight_files
from gpu_worker.model.quantization import Quantization
from gpu_worker.model.torch_decoder import TorchDecoder
from gpu_worker.model.transformers_config import foreign_class, open_foreign_config
from kernels.kv_write import WriteSlots, kv_write
from kernels.paged_attention import PagedBatch, paged_attention
from shared.errors import ConfigError, shorten
from shared.logs import get_log

ATTENTION = "quire_paged"
PROGRESS_PAUSE_S = 1.0

_log = get_log("loader")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What the attention of all layers shares. `windows`: of each layer, None: all is kept. `layers`: that called."""

    cache: KvCache
    slots: WriteSlots
    batch: PagedBatch
    windows: tuple[int | None, ...]
    layers: list[int] = field(default_factory=list)


_STEP: ContextVar[_Step] = ContextVar("step")


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **wishes: Any
) -> tuple[Tensor, None]:
    """What the registry calls.

    Args:
        module: the layer's attention.
        query, key, value: [1, heads, rows, head_size].
        attention_mask: there must be none.
        wishes: scaling, sliding_window and softcap are obeyed.

    Returns:
        [1, rows, heads, head_size], and no weights.
    """
    step, layer = _STEP.get(), module.layer_idx
    assert isinstance(layer, int)
    window, scale = wishes.get("sliding_window"), wishes.get("scaling")
    _check_wishes(module, attention_mask, wishes)
    kept = step.windows[layer]
    if kept is not None and (window is None or window > kept):
        raise ConfigError(f"sliding_window = {kept}: layer {layer} asks for {window or 'all'} of the context")
    step.layers.append(layer)
    queries, keys, values = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    key_cache, value_cache, scales = step.cache.keys(layer), step.cache.values(layer), step.cache.scales(layer)
    kv_write(keys, values, key_cache, value_cache, step.slots, scales=scales)
    mixed = paged_attention(
        queries, key_cache, value_cache, step.batch, query.shape[-1] ** -0.5 if scale is None else scale,
        kv_scales=scales, window=window, softcap=wishes.get("softcap"),
    )  # fmt: skip
    return mixed.to(value.dtype)[None], None


def _check_wishes(module: nn.Module, mask: Tensor | None, wishes: dict[str, Any]) -> None:
    """Raise `ConfigError` for what the paged attention would not honour."""
    is_causal = wishes.get("is_causal")
    asked = {
        "a mask of its own": mask is not None,
        "sinks": wishes.get("s_aux") is not None,
        "a bias of positions": wishes.get("position_bias") is not None,
        "keys behind the query": not (getattr(module, "is_causal", True) if is_causal is None else is_causal),
    }
    if any(asked.values()):
        raise ConfigError(f"its attention asks for {', '.join(name for name, is_asked in asked.items() if is_asked)}")


class TransformersDecoder(TorchDecoder):
    """A `Decoder` around a model of `transformers`.

    Args:
        model: with `ATTENTION`.
        config: its shape.
    """

    def __init__(self, model: nn.Module, config: CheckpointConfig) -> None:
        super().__init__()
        self._model, self._config = model, config
        head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        head.register_forward_pre_hook(self._note_hidden)

    def check(self, layout: KvLayout, device: torch.device) -> None:
        """Raise `ConfigError` unless the model's code asks for what a cache of `layout` holds."""
        one, slots = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        starts, contexts, tables = (
            torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([0, 1], [1], [[0]])
        )
        batch = PagedBatch(starts, contexts, tables, layout.block_size)
        step = self._step(slots, batch, layout.allocate(1, device))
        name, num_layers = self._config.architecture, self._config.num_layers
        try:
            self._forward(one, slots, one, step)
        except (ConfigError, ValueError, AttributeError, TypeError, IndexError) as error:
            raise ConfigError(f"{name} does not fit --model-impl=transformers: {shorten(error)}") from None
        if step.layers != list(range(num_layers)):
            raise ConfigError(
                f"{name} does not fit --model-impl=transformers: attention of layers {step.layers}, not of {num_layers}"
            )

    def _note_hidden(self, head: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self._wanted_hidden = arguments[0][0]

    def _compute_logits(self, inputs: StepInputs, cache: KvCache) -> Tensor:
        step = self._step(inputs.slots, inputs.batch, cache)
        return self._forward(inputs.token_ids, inputs.positions, inputs.wanted_rows, step)

    def _step(self, slots: Tensor, batch: PagedBatch, cache: KvCache) -> _Step:
        return _Step(cache=cache, slots=WriteSlots(slots, batch.block_size), batch=batch, windows=self._config.windows)

    def _forward(self, token_ids: Tensor, positions: Tensor, wanted_rows: Tensor, step: _Step) -> Tensor:
        token = _STEP.set(step)
        try:
            output = self._model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                return_dict=True,
                logits_to_keep=wanted_rows,
            )
        finally:
            _STEP.reset(token)
        logits: Tensor = output.logits[0]
        return logits.float()


class _Projection(nn.Module):
    """Our `Linear` in the place of a module of `transformers`."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]"""
        y = self._linear(x.flatten(0, -2))
        return y.view(*x.shape[:-1], y.shape[-1])


def load_transformers(
    config: CheckpointConfig, folder: Path, *, dtype: torch.dtype, device: torch.device, quantization: Quantization,
    layout: KvLayout,
) -> TransformersDecoder:  # fmt: skip
    """The model of `config` from the safetensors files in `folder`, checked against `layout`.

    Raises:
        ConfigError: weights are missing or left over, or the model's code asks for what does not fit.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)
    since, num_bytes = time.monotonic(), sum(path.stat().st_size for path in weight_files(folder))
    with _progress():
        model = _load_weights(config, folder, dtype)
    model.to(device).eval().requires_grad_(False)
    with torch.inference_mode():
        _adopt_projections(model, model.get_output_embeddings(), quantization)
        decoder = TransformersDecoder(model, config)
        decoder.check(layout, device)
    _log.info("weights.loaded", seconds=time.monotonic() - since, mib=num_bytes / 2**20, by="transformers")
    return decoder


def _load_weights(config: CheckpointConfig, folder: Path, dtype: torch.dtype) -> Any:
    try:
        model, found = foreign_class(config.architecture).from_pretrained(
            folder,
            config=open_foreign_config(open_config(folder), config.architecture),
            dtype=dtype,
            attn_implementation=ATTENTION,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{folder}: transformers cannot load it: {shorten(error)}") from None
    for kind, what in (("missing_keys", "the weights hold no tensor"), ("mismatched_keys", "other shapes have"),
                       ("unexpected_keys", "the model has no place for")):  # fmt: skip
        if found[kind]:
            raise ConfigError(f"{folder}: {what} {shorten(', '.join(sorted(map(str, found[kind]))))}")
    return model


def _adopt_projections(module: nn.Module, head: nn.Module | None, quantization: Quantization) -> None:
    """Put our `Linear` in the place of all projections inside `module`, one after another, so that at most one weight
    exists twice. `head`: the output projection."""
    from transformers.pytorch_utils import Conv1D

    for name, child in list(module.named_children()):
        if type(child) not in (nn.Linear, Conv1D):
            _adopt_projections(child, head, quantization)
            continue
        kind = quantization.outer if child is head else quantization.body
        setattr(module, name, _Projection(_make_linear(child, kind, is_turned=type(child) is Conv1D)))


def _make_linear(module: nn.Module, kind: str, *, is_turned: bool) -> Linear:
    """Of the weight and bias of `module`. `is_turned`: the weight is [in, out]."""
    weights = {name: weight.detach() for name, weight in module.named_parameters(recurse=False)}
    weight = weights["weight"].T if is_turned else weights["weight"]
    return Linear(weight, weights.get("bias"), kind)


@contextmanager
def _progress() -> Iterator[None]:
    """Within the block the bars of `transformers` are lines of our log."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    previous = logging.set_tqdm_hook(lambda _, args, kwargs: _LoggedProgress(*args, **kwargs))
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)


class _LoggedProgress:
    """What `transformers` iterates over, with a line of log now and then."""

    def __init__(self, items: Any, **_: Any) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        last, total = time.monotonic(), len(self._items)
        for number, item in enumerate(self._items):
            if time.monotonic() - last >= PROGRESS_PAUSE_S:
                last = time.monotonic()
                _log.info("weights.loading", tensors=f"{number}/{total}")
            yield item
