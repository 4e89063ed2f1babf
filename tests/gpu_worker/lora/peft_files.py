"""Adapters as PEFT writes them, with random factors, and the models that they make of others."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj", "gate_up_proj")


def load_model(folder: Path) -> Any:
    """The model as `transformers` has it, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def write_adapter(
    model: Any, folder: Path, *, targets: tuple[str, ...] = ALL, rank: int = 4, seed: int = 0, **settings: Any
) -> Path:
    """The folder of an adapter of all linears of `model` (of `transformers`) whose names end in one of `targets`.

    Args:
        settings: further ones of adapter_config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "use_dora": False,
              "target_modules": sorted(targets), **settings}  # fmt: skip
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in targets and "experts" not in name:
            own = _of(config.get("rank_pattern", {}), name, rank)
            out, width = module.weight.shape
            a = torch.empty(own, width).normal_(0.0, 1.0 / width**0.5, generator=generator)
            b = torch.empty(out, own).normal_(0.0, 0.3 / own**0.5, generator=generator)
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(model: Any, folder: Path) -> Any:
    """`model` with W + scale · B · A in place of each W that the adapter in `folder` changes."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    with torch.no_grad():
        for key in [name for name in tensors if "lora_A" in name]:
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            rank = len(tensors[key])
            alpha = _of(config.get("alpha_pattern", {}), name, config["lora_alpha"])
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            modules[name].weight += scale * tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
    return model


def _of(pattern: dict[str, Any], name: str, default: Any) -> Any:
    return next((value for end, value in pattern.items() if name.endswith(end)), default)
