"""A decoder's weights in the CPU kernels' order, and their file in the cache folder.

Packing takes seconds a gigabyte, so what was packed once is kept as safetensors under a name made of the checkpoint's
fingerprint, the precision and `FORMAT`; the next start only reads it. The weights themselves are copied into an arena
of huge pages (kernels/cpu/arena.py), the file is not mapped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gpu_worker.model.config import CheckpointConfig, Experts
from gpu_worker.model.loader import Checkpoint
from gpu_worker.model.quantization import Quantization, quantize
from gpu_worker.model.weights import LayerWeights, MlpWeights, Projection, read_layer, read_outer
from gpu_worker.quant.rows import combine
from kernels.cpu.arena import ALIGNMENT, Arena
from kernels.cpu.linear import PackedWeight, interleave, pack_float
from kernels.cpu.ops import Dtype
from kernels.cpu.pack import pack_quantized
from kernels.grouped_weight import Weight
from shared.errors import ConfigError
from shared.logs import get_log

FORMAT = 1
"""Raise it when the order of panels changes: files of another format are packed again."""
_NORMS = ("input_norm", "mlp_norm", "query_norm", "key_norm", "post_attention_norm", "post_mlp_norm")
"""Of a layer; not all have all."""

_log = get_log("packed_weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedProjection:
    """A linear's weight and its bias [out] float32, if it has one."""

    weight: PackedWeight
    bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMlp:
    """One feed-forward layer, or one expert. `gate_up` alternates panels of gate and up."""

    gate_up: PackedProjection
    down: PackedProjection


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts:
    """Experts behind a `router`, which is never quantized."""

    router: PackedWeight
    experts: tuple[PackedMlp, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayer:
    """One decoder block. Norms are float32, and there where `LayerWeights` has them."""

    input_norm: Tensor
    qkv: PackedProjection
    output: PackedProjection
    mlp_norm: Tensor
    mlp: PackedMlp | PackedExperts
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    post_attention_norm: Tensor | None = None
    post_mlp_norm: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedModel:
    """All weights. `embedding` is the packed head itself where they are tied."""

    embedding: PackedWeight
    layers: tuple[PackedLayer, ...]
    norm: Tensor
    head: PackedWeight

    @property
    def num_bytes(self) -> int:
        """Memory that the weights take."""
        weights = {id(w): w for w in (self.embedding, self.head, *_weights(self.layers))}
        return sum(weight.num_bytes for weight in weights.values())


def pack_model(config: CheckpointConfig, checkpoint: Checkpoint, quantization: Quantization) -> PackedModel:
    """The checkpoint's weights, quantized if asked for, and packed layer by layer.

    Raises:
        ConfigError: a weight cannot be quantized.
    """
    outer = read_outer(config, checkpoint)
    arena = Arena(_capacity(config, outer.embedding.element_size()))
    pack = _Packing(arena, quantization)
    head = pack.weight(outer.head, quantization.outer)
    embedding = head if config.is_tied else pack.weight(outer.embedding, "none")
    layers = tuple(pack.layer(read_layer(config, checkpoint, layer)) for layer in range(config.num_layers))
    return PackedModel(embedding=embedding, layers=layers, norm=outer.norm.float(), head=head)


def save_packed(model: PackedModel, path: Path) -> None:
    """Write `model` to `path`; a failure only costs the next start its time."""
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, Any] = {}
    for name, part in _flatten(model):
        if isinstance(part, PackedWeight):
            shapes[name] = [part.dtype.name, part.in_features, part.out_features]
            tensors |= {f"{name}.{key}": tensor for key, tensor in part.tensors().items()}
        else:
            tensors[name] = part
    made = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, made, metadata={"weights": json.dumps(shapes)})
        made.rename(path)
        _log.info("weights.kept", file=path)
    except (OSError, SafetensorError) as error:
        _log.warning("weights.unsaved", path=path, error=error)
    finally:
        made.unlink(missing_ok=True)


def load_packed(config: CheckpointConfig, path: Path) -> PackedModel | None:
    """What `save_packed` wrote to `path`; None when there is no such file, or it is not whole."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return _Reading(file, path.stat().st_size).model(config)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        _log.warning("weights.unreadable", path=path, error=error)
        return None


class _Reading:
    """One file being read into an arena."""

    def __init__(self, file: Any, num_bytes: int) -> None:
        self._file = file
        self._names = frozenset(file.keys())
        self._arena = Arena(num_bytes + ALIGNMENT * len(self._names))
        self._shapes = json.loads(file.metadata()["weights"])

    def model(self, config: CheckpointConfig) -> PackedModel:
        head = self._weight("head")
        return PackedModel(
            embedding=head if config.is_tied else self._weight("embedding"),
            layers=tuple(self._layer(f"layers.{i}.", experts) for i, experts in enumerate(_experts(config))),
            norm=self._tensor("norm"),
            head=head,
        )

    def _layer(self, name: str, experts: Experts | None) -> PackedLayer:
        norms = {norm: self._tensor(name + norm) for norm in _NORMS if name + norm in self._names}
        mlp: PackedMlp | PackedExperts
        if experts is None:
            mlp = self._mlp(name)
        else:
            mlps = tuple(self._mlp(f"{name}experts.{i}.") for i in range(experts.count))
            mlp = PackedExperts(router=self._weight(name + "router"), experts=mlps)
        qkv, output = (self._projection(name + part) for part in ("qkv", "output"))
        return PackedLayer(**norms, qkv=qkv, output=output, mlp=mlp)

    def _mlp(self, name: str) -> PackedMlp:
        return PackedMlp(gate_up=self._projection(name + "gate_up"), down=self._projection(name + "down"))

    def _projection(self, name: str) -> PackedProjection:
        bias = self._tensor(f"{name}.bias") if f"{name}.bias" in self._names else None
        return PackedProjection(weight=self._weight(name), bias=bias)

    def _weight(self, name: str) -> PackedWeight:
        dtype, in_features, out_features = self._shapes[name]
        parts = {part: self._tensor(f"{name}.{part}") for part in ("panels", "scales", "order")
                 if f"{name}.{part}" in self._names}  # fmt: skip
        return PackedWeight(dtype=Dtype[dtype], in_features=in_features, out_features=out_features, **parts)

    def _tensor(self, name: str) -> Tensor:
        return self._arena.copy(self._file.get_tensor(name))


class _Packing:
    """Weights on their way into an arena."""

    def __init__(self, arena: Arena, quantization: Quantization) -> None:
        self._arena = arena
        self._quantization = quantization

    def layer(self, weights: LayerWeights) -> PackedLayer:
        norms = {norm: weight.float() for norm in _NORMS if (weight := getattr(weights, norm)) is not None}
        qkv, output = self._projection(weights.qkv), self._projection(weights.output)
        mlps = tuple(self._mlp(mlp) for mlp in weights.mlp)
        if weights.router is None:
            return PackedLayer(**norms, qkv=qkv, output=output, mlp=mlps[0])
        _check_alike(mlps)
        experts = PackedExperts(router=self.weight(weights.router.weight, "none"), experts=mlps)
        return PackedLayer(**norms, qkv=qkv, output=output, mlp=experts)

    def _mlp(self, mlp: MlpWeights) -> PackedMlp:
        gate, up = mlp.gate, mlp.up
        gate_up = Projection(
            weight=combine((gate.weight, up.weight), interleave),
            bias=None if gate.bias is None or up.bias is None else interleave(gate.bias, up.bias),
        )
        return PackedMlp(gate_up=self._projection(gate_up), down=self._projection(mlp.down))

    def _projection(self, projection: Projection) -> PackedProjection:
        bias = None if projection.bias is None else projection.bias.float()
        return PackedProjection(weight=self.weight(projection.weight, self._quantization.body), bias=bias)

    def weight(self, weight: Weight, kind: str) -> PackedWeight:
        if isinstance(weight, Tensor):
            packed = pack_float(weight) if kind == "none" else pack_quantized(quantize(weight, kind))
        else:
            packed = pack_quantized(weight)
        return packed.moved(self._arena)


def _check_alike(experts: tuple[PackedMlp, ...]) -> None:
    """Raise `ConfigError` for experts that one product cannot take: it reads all of a layer's alike."""
    for weights in zip(*((mlp.gate_up.weight, mlp.down.weight) for mlp in experts), strict=True):
        if len({weight.dtype for weight in weights}) > 1 or any(weight.order is not None for weight in weights):
            raise ConfigError("experts that are quantized differently, or with desc_act, are not for the CPU kernels; "
                              "set --cpu-kernels=off")  # fmt: skip


def _capacity(config: CheckpointConfig, element_size: int) -> int:
    """Bytes of the arena: every weight in `element_size`, with room for each one's padding."""
    hidden, ffn, size = config.hidden_size, config.intermediate_size, config.head_size
    qkv = (config.num_heads + 2 * config.num_kv_heads) * size
    shapes = config.num_layers * [(qkv, hidden), (hidden, config.num_heads * size)]
    for experts in _experts(config):
        count, inner = (1, ffn) if experts is None else (experts.count, experts.size)
        shapes += count * [(2 * inner + 32, hidden), (hidden, inner)]
        shapes += [] if experts is None else [(experts.count, hidden)]
    shapes += (1 if config.is_tied else 2) * [(config.vocab_size, hidden)]
    return sum((out + 16) * (width + 32) * element_size for out, width in shapes)


def _experts(config: CheckpointConfig) -> tuple[Experts | None, ...]:
    """Of each layer."""
    return config.experts or (None,) * config.num_layers


def _weights(layers: tuple[PackedLayer, ...]) -> Iterator[PackedWeight]:
    for layer in layers:
        for _, part in _flatten_linears(layer):
            if isinstance(part, PackedWeight):
                yield part


def _flatten_linears(layer: PackedLayer) -> Iterator[tuple[str, PackedWeight | Tensor]]:
    """A block's weights and biases with their names."""
    projections = {"qkv": layer.qkv, "output": layer.output}
    if isinstance(layer.mlp, PackedMlp):
        projections |= {"gate_up": layer.mlp.gate_up, "down": layer.mlp.down}
    else:
        yield "router", layer.mlp.router
        for i, expert in enumerate(layer.mlp.experts):
            projections |= {f"experts.{i}.gate_up": expert.gate_up, f"experts.{i}.down": expert.down}
    for name, projection in projections.items():
        yield name, projection.weight
        if projection.bias is not None:
            yield f"{name}.bias", projection.bias


def _flatten(model: PackedModel) -> Iterator[tuple[str, PackedWeight | Tensor]]:
    """Every weight and tensor with its name in the file."""
    yield "head", model.head
    if model.embedding is not model.head:
        yield "embedding", model.embedding
    yield "norm", model.norm
    for i, layer in enumerate(model.layers):
        for norm in _NORMS:
            weight: Tensor | None = getattr(layer, norm)
            if weight is not None:
                yield f"layers.{i}.{norm}", weight
        for name, part in _flatten_linears(layer):
            yield f"layers.{i}.{name}", part
