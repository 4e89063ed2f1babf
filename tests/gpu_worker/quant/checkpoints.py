"""Quantized checkpoints made of tiny float ones, written from the formats' definitions, each beside the same model with
the weights that its integers stand for as floats."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.gpu_worker.model.tiny_families import SIZES, write_tiny_model

LLAMA: dict[str, Any] = SIZES | {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, Tensor]
Pack = Callable[[Tensor], tuple[Tensors, Tensor]]
"""From a weight [out, in] to its tensors, by what comes behind the linear's name, and to what they stand for."""


@dataclass(frozen=True)
class Form:
    """A format: `quantization_config`, and what it makes of a linear."""

    config: dict[str, Any]
    pack: Pack


def write_quantized(form: Form, folder: Path, model: dict[str, Any] = LLAMA, *, dtype: str = "float32") -> Path:
    """The folder of the quantized checkpoint; `folder / "floats"` is the other one."""
    source = write_tiny_model(model, folder / "source")
    stored: Tensors = {}
    floats: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = floats[name] = tensor
        if name.endswith("proj.weight") or ".experts." in name:
            parts, floats[name] = form.pack(tensor)
            del stored[name]
            stored |= {name.removesuffix("weight") + part: made.contiguous() for part, made in parts.items()}
    shutil.copytree(source, folder / "floats")
    save_file(floats, folder / "floats" / "model.safetensors", metadata={"format": "pt"})
    shutil.move(source, folder / "quantized")
    save_file(stored, folder / "quantized" / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder / "quantized", quantization_config=form.config, dtype=dtype)
    return folder / "quantized"


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def pack_int32(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Numbers 0 … 15 [rows, n] in int32 [rows, n / 8]: number order[i] of eight takes bits 4i … 4i + 3."""
    words = sum(numbers[:, place::8].long() << 4 * i for i, place in enumerate(order))
    assert isinstance(words, Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


@dataclass(frozen=True)
class Groups:
    """A weight [out, in] rounded to n, scales and zeros [out, groups]; `columns` [in]: the group of each column."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor
    columns: Tensor

    @property
    def floats(self) -> Tensor:
        return (self.numbers - self.zeros[:, self.columns]) * self.scales[:, self.columns].float()


def round_groups(weight: Tensor, group: int, *, is_symmetric: bool = False, is_mixed: bool = False) -> Groups:
    """Plain rounding. `is_mixed`: a group's columns are not neighbours."""
    width = weight.shape[1]
    group = width if group == -1 else group
    columns = torch.arange(width) // group
    if is_mixed:
        columns = columns[torch.randperm(width, generator=torch.Generator().manual_seed(width))]
    scales, zeros = torch.zeros(len(weight), width // group), torch.zeros(len(weight), width // group)
    for i in range(width // group):
        own = weight[:, columns == i]
        low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
        scales[:, i] = (torch.maximum(-low, high) / 7.5 if is_symmetric else (high - low) / 15).half().float()
        zeros[:, i] = 8 if is_symmetric else (-low / scales[:, i]).round().clamp(0, 15)
    numbers = (weight / scales[:, columns]).round().add(zeros[:, columns]).clamp(0, 15)
    return Groups(numbers, scales.half(), zeros, columns)


def awq(group: int) -> Form:
    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        made = round_groups(weight, group)
        return {
            "qweight": pack_int32(made.numbers.T, AWQ_ORDER),
            "qzeros": pack_int32(made.zeros.T, AWQ_ORDER),
            "scales": made.scales.T,
        }, made.floats

    return Form({"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True,
                 "modules_to_not_convert": None}, pack)  # fmt: skip


def gptq(group: int, *, is_symmetric: bool = False, desc_act: bool = False, is_v2: bool = False) -> Form:
    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        made = round_groups(weight, group, is_symmetric=is_symmetric, is_mixed=desc_act)
        zeros = made.zeros if is_v2 else (made.zeros - 1) % 16
        return {
            "qweight": pack_int32(made.numbers).T,
            "qzeros": pack_int32(zeros.T),
            "scales": made.scales.T,
            "g_idx": made.columns.int(),
        }, made.floats

    return Form({"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": desc_act, "sym": is_symmetric,
                 "checkpoint_format": "gptq_v2" if is_v2 else "gptq"}, pack)  # fmt: skip


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """A `quantization_config` of llm-compressor."""
    group = {"targets": ["Linear"], "input_activations": None, "output_activations": None, "weights": weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
            "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"}  # fmt: skip


def packed_int4(group: int, *, is_symmetric: bool, is_mixed: bool = False) -> Form:
    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        made = round_groups(weight, group, is_symmetric=is_symmetric, is_mixed=is_mixed)
        parts = {
            "weight_packed": pack_int32(made.numbers),
            "weight_scale": made.scales.float(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            parts["weight_zero_point"] = pack_int32(made.zeros.T).T
        if is_mixed:
            parts["weight_g_idx"] = made.columns.int()
        return parts, made.floats

    return Form(compressed("pack-quantized", num_bits=4, type="int", symmetric=is_symmetric, group_size=group,
                           strategy="channel" if group == -1 else "group", actorder="group" if is_mixed else None),
                pack)  # fmt: skip


def int8(*, is_packed: bool) -> Form:
    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        scales = weight.abs().amax(1, keepdim=True) / 127
        values = (weight / scales).round()
        parts = {"weight_scale": scales, "weight": values.to(torch.int8)}
        if is_packed:
            parts["weight_packed"] = (parts.pop("weight") + 128).view(torch.int32)
            parts["weight_shape"] = torch.tensor(weight.shape)
        return parts, values * scales

    return Form(compressed("pack-quantized" if is_packed else "int-quantized", num_bits=8, type="int", symmetric=True,
                           strategy="channel"), pack)  # fmt: skip


def fp8(config: dict[str, Any], *, is_per_channel: bool) -> Form:
    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        scales = (weight.abs().amax(1, keepdim=True) if is_per_channel else weight.abs().amax().view(1)) / 448
        values = (weight / scales).to(torch.float8_e4m3fn)
        parts = {"weight": values, "weight_scale": scales, "input_scale": torch.ones(1)}
        return parts, values.float() * scales

    return Form(config, pack)


def compressed_fp8(strategy: str) -> Form:
    config = compressed("float-quantized", num_bits=8, type="float", symmetric=True, strategy=strategy)
    return fp8(config, is_per_channel=strategy == "channel")


FORMS = {
    "awq 32": awq(32),
    "awq 128": awq(128),
    "awq -1": awq(-1),
    "gptq 64": gptq(64),
    "gptq symmetric": gptq(32, is_symmetric=True),
    "gptq desc_act": gptq(32, desc_act=True),
    "gptq v2": gptq(128, is_v2=True),
    "int4 symmetric": packed_int4(64, is_symmetric=True),
    "int4 asymmetric": packed_int4(32, is_symmetric=False),
    "int4 channel": packed_int4(-1, is_symmetric=False),
    "int4 actorder": packed_int4(64, is_symmetric=True, is_mixed=True),
    "int8": int8(is_packed=False),
    "int8 packed": int8(is_packed=True),
    "fp8 tensor": compressed_fp8("tensor"),
    "fp8 channel": compressed_fp8("channel"),
    "fp8 plain": fp8({"quant_method": "fp8", "activation_scheme": "static"}, is_per_channel=False),
}
"""All that can be read, by what sets them apart."""
