"""A quantized checkpoint from a float one, layer by layer: `quire quantize`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_worker.model.config import CheckpointConfig
from gpu_worker.model.families import read_config
from gpu_worker.model.loader import Checkpoint
from gpu_worker.model.weights import read_layer
from gpu_worker.quant.awq import FloatLayer, search_layer
from gpu_worker.quant.calibration import Calibration
from gpu_worker.quant.output import CheckpointWriter
from gpu_worker.quant.rounding import awq_tensors, packed_tensors, round_to_groups
from gpu_worker.quant.scheme import GROUPS
from kernels.quantized_linear import quantize_int8
from shared.errors import ConfigError

METHODS = ("awq", "int8", "int4")
_PARTS = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
          "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}  # fmt: skip

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What to make: one of `METHODS`; groups of `group` numbers, −1: a layer's whole width (not of int8)."""

    method: str
    group: int


def make_checkpoint(source: Path, out: Path, recipe: Recipe, windows: list[list[int]], say: Say) -> int:
    """Write the checkpoint in `source` quantized to `out`; the bytes of its tensors.

    Args:
        windows: token ids of the texts that awq is calibrated with.
        say: takes progress lines.

    Raises:
        ConfigError: the model or the group does not allow it.
    """
    config = read_config(source)
    _refuse(config, recipe)
    checkpoint = Checkpoint(source, dtype=torch.float32, device=torch.device("cpu"))
    made = _Making(config, checkpoint, recipe)
    with torch.inference_mode(), CheckpointWriter(out) as writer:
        layers = made.awq_layers(windows) if recipe.method == "awq" else made.rounded_layers()
        last = time.monotonic()
        for layer, tensors in enumerate(layers):
            for name, tensor in tensors.items():
                writer.add(name, tensor)
            if time.monotonic() - last > 1.0 or layer + 1 == config.num_layers:
                last = time.monotonic()
                say(f"layer {layer + 1} of {config.num_layers}")
        for name, tensor in made.others():
            writer.add(name, tensor)
        checkpoint.close()
        say("writing")
        writer.close(source, _config_json(source, recipe))
    return writer.num_bytes


def _refuse(config: CheckpointConfig, recipe: Recipe) -> None:
    if config.scheme is not None:
        raise ConfigError(f"--model: its weights are quantized already, by {config.scheme.method}; give the floats")
    lacks = {
        "experts": any(config.experts),
        "fused projections": config.is_fused,
        "norms behind attention": config.has_post_norms,
    }
    if any(lacks.values()):
        wanted = ", ".join(name for name, is_there in lacks.items() if is_there)
        raise ConfigError(f"--model: {config.architecture} has {wanted}, which `quire quantize` is not built for")
    widths = {config.hidden_size, config.num_heads * config.head_size, config.intermediate_size}
    outs = widths | {config.num_kv_heads * config.head_size}
    if any(out % 8 for out in outs):
        raise ConfigError(f"--model: its layers are {sorted(outs)} wide; only multiples of 8 can be packed")
    if recipe.method != "int8" and recipe.group != -1 and any(width % recipe.group for width in widths):
        fit = ", ".join(str(g) for g in GROUPS if g == -1 or not any(width % g for width in widths))
        raise ConfigError(f"--group-size={recipe.group}: does not divide the layers' widths, {sorted(widths)}; "
                          f"those that do: {fit}")  # fmt: skip


class _Making:
    """The tensors of the new checkpoint, by their names, a layer at a time."""

    def __init__(self, config: CheckpointConfig, checkpoint: Checkpoint, recipe: Recipe) -> None:
        self._config, self._checkpoint, self._recipe = config, checkpoint, recipe
        self._written: set[str] = set()

    def rounded_layers(self) -> Iterator[dict[str, Tensor]]:
        """Of int8 and int4: linears rounded to the nearest."""
        for layer in range(self._config.num_layers):
            tensors: dict[str, Tensor] = {}
            for name in self._names(layer).values():
                weight = self._take(f"{name}.weight").float()
                tensors |= {f"{name}.{part}": tensor for part, tensor in self._round(weight).items()}
            yield tensors

    def awq_layers(self, windows: list[list[int]]) -> Iterator[dict[str, Tensor]]:
        """Of awq: linears scaled and rounded, the norms and biases that scales went into."""
        embedding = self._checkpoint.take_stored("model.embed_tokens.weight")
        calibration = Calibration(self._config, windows, embedding)
        for layer in range(self._config.num_layers):
            inputs = calibration.advance(layer, read_layer(self._config, self._checkpoint, layer))
            names, floats = self._names(layer), self._float_layer(layer)
            tensors: dict[str, Tensor] = {}
            for part, rounded in search_layer(floats, inputs, self._group(inputs.down.shape[1])).items():
                tensors |= {f"{names[part]}.{key}": tensor for key, tensor in awq_tensors(rounded).items()}
            tensors |= {f"{names[part]}.bias": _half(names[part], bias) for part, bias in floats.biases.items()}
            for norm, weight in zip(self._norms(layer), (floats.input_norm, floats.mlp_norm), strict=True):
                tensors[norm] = _half(norm, weight)
            yield tensors

    def others(self) -> Iterator[tuple[str, Tensor]]:
        """What stays a float: as it is, for awq in float16."""
        for name in sorted(self._checkpoint.names - self._written):
            tensor = self._checkpoint.take_stored(name)
            yield name, _half(name, tensor) if self._recipe.method == "awq" else tensor

    def _float_layer(self, layer: int) -> FloatLayer:
        names, config = self._names(layer), self._config
        input_norm, mlp_norm = (self._take(name).float().clone() for name in self._norms(layer))
        biases = {part: f"{name}.bias" for part, name in names.items() if self._checkpoint.has(f"{name}.bias")}
        return FloatLayer(
            linears={part: self._take(f"{name}.weight").float().clone() for part, name in names.items()},
            biases={part: self._take(name).float().clone() for part, name in biases.items()},
            input_norm=input_norm,
            mlp_norm=mlp_norm,
            kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            norm_dtype=torch.float16,
        )

    def _round(self, weight: Tensor) -> dict[str, Tensor]:
        if self._recipe.method == "int4":
            return packed_tensors(round_to_groups(weight, self._group(weight.shape[1])))
        quantized = quantize_int8(weight)
        return {"weight": quantized.values, "weight_scale": quantized.scales[:, None]}

    def _group(self, width: int) -> int:
        return width if self._recipe.group == -1 else self._recipe.group

    def _take(self, name: str) -> Tensor:
        self._written.add(name)
        return self._checkpoint.take_stored(name)

    def _names(self, layer: int) -> dict[str, str]:
        return {part: f"model.layers.{layer}.{name}" for part, name in _PARTS.items()}

    def _norms(self, layer: int) -> tuple[str, str]:
        return (
            f"model.layers.{layer}.input_layernorm.weight",
            f"model.layers.{layer}.post_attention_layernorm.weight",
        )


def _half(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    half = tensor.to(torch.float16)
    if not bool(half.isfinite().all()):
        raise ConfigError(f"--method=awq: {name} holds numbers beyond float16, which such checkpoints are in; "
                          "use int4 or int8")  # fmt: skip
    return half


def _config_json(source: Path, recipe: Recipe) -> dict[str, Any]:
    """The new config.json."""
    raw: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if recipe.method != "awq":
        return raw | {"quantization_config": _compressed(recipe)}
    raw.pop("dtype", None)
    return raw | {
        "torch_dtype": "float16",
        "quantization_config": {
            "quant_method": "awq",
            "bits": 4,
            "group_size": recipe.group,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": None,
        },
    }


def _compressed(recipe: Recipe) -> dict[str, Any]:
    is_int4 = recipe.method == "int4"
    by_group = {"symmetric": False, "strategy": "group", "group_size": recipe.group}
    by_channel = {"symmetric": not is_int4, "strategy": "channel", "group_size": None}
    weights = {"num_bits": 4 if is_int4 else 8, "type": "int", "dynamic": False, "actorder": None,
               "observer": "minmax"} | (by_group if is_int4 and recipe.group != -1 else by_channel)  # fmt: skip
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None if is_int4 else activations,
             "output_activations": None}  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if is_int4 else "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
