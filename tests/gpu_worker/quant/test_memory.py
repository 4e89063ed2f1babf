"""4-bit weights stay at 4 bits in memory, and their packed form is kept."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpu_worker.model import cpu_kernels as cpu_kernels_module
from gpu_worker.model.cpu_decoder import CpuDecoder
from tests.gpu_worker.model.plans import generate, give_blocks, make_runner, make_sequence
from tests.gpu_worker.model.tiny_families import SIZES
from tests.gpu_worker.quant.checkpoints import FORMS, awq, write_quantized

HIDDEN, INNER, LAYERS = 1024, 4096, 4


def resident_bytes(tensor: Tensor) -> int:
    """Memory that the mapping which `tensor` lies in really takes."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(match[1], 16) <= tensor.data_ptr() < int(match[2], 16)
        elif is_inside and line.startswith("Rss:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no mapping holds the tensor")


def write_awq_model(folder: Path) -> int:
    """A checkpoint of random AWQ weights in groups of 128; the number of its quantized weights."""
    config = SIZES | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN,
                      "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
                      "num_key_value_heads": 8, "dtype": "float16", "quantization_config": awq(128).config}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    attention = {f"self_attn.{part}_proj": (HIDDEN, HIDDEN) for part in "qkvo"}
    mlp = {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
    half = torch.float16
    tensors = {name: torch.randn(320, HIDDEN, dtype=half) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=half)
    num_weights = 0
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(HIDDEN, dtype=half)
        for name, (out, width) in (attention | mlp).items():
            num_weights += out * width
            words = torch.randint(-(2**31), 2**31, (width + width // 128, out // 8), dtype=torch.int32)
            tensors[f"{prefix}{name}.qweight"] = words[:width].contiguous()
            tensors[f"{prefix}{name}.qzeros"] = words[width:].contiguous()
            tensors[f"{prefix}{name}.scales"] = torch.rand(width // 128, out, dtype=half) / 100
    save_file(tensors, folder / "model.safetensors")
    return num_weights


def test_four_bit_weights_take_a_third_of_bfloat16(tmp_path: Path, cpu_kernels: Path) -> None:
    """The quantized layers should take at most 0.32 of bfloat16's bytes, measured as resident memory."""
    num_weights = write_awq_model(tmp_path)
    runner = make_runner(tmp_path, dtype="auto", cpu_kernels="on", cache_dir=str(cpu_kernels), max_model_len=64)
    assert isinstance(runner._model, CpuDecoder)
    model = runner._model._weights
    resident = resident_bytes(model.layers[0].qkv.weight.panels)
    others = model.embedding.num_bytes + model.head.num_bytes
    assert 0.25 < (resident - others) / (2 * num_weights) <= 0.32


def test_torch_holds_four_bits_too(tmp_path: Path) -> None:
    """Without the kernels the tensors that linears hold should be as small."""
    num_weights = write_awq_model(tmp_path)
    runner = make_runner(tmp_path, dtype="float32", cpu_kernels="off", max_model_len=64)
    held = 0
    for layer in runner._model._layers:  # type: ignore[attr-defined]
        for linear in (layer._attention._qkv, layer._attention._output, layer._mlp._gate_up, layer._mlp._down):
            weight = linear._weight
            held += sum(part.nbytes for part in (weight.nibbles, weight.scales, weight.zeros))
    assert held <= 0.32 * 2 * num_weights


@pytest.mark.parametrize("name", ["awq 32", "gptq desc_act", "fp8 channel"])
def test_packed_weights_are_read_back_the_same(
    name: str, tmp_path: Path, cache_dir: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A second start should read the packed file and give the same tokens; other weights under the same name should
    not be taken for these."""
    monkeypatch.setattr(cpu_kernels_module, "MIN_KEPT_BYTES", 0)
    caplog.set_level(logging.INFO)
    folder = write_quantized(FORMS[name], tmp_path)

    def draw() -> list[list[int]]:
        runner = make_runner(folder, cpu_kernels="on", cache_dir=cache_dir, max_model_len=64)
        sequence = make_sequence([5, 7, 11, 200, 31])
        give_blocks([sequence], runner.block_size, 30)
        return generate(runner, [sequence], 20)

    first = draw()
    assert "weights.read" not in caplog.text
    assert draw() == first
    assert "weights.read" in caplog.text
    weights = load_file(folder / "model.safetensors")
    scales = {
        key: tensor * 2 for key, tensor in weights.items() if key.endswith(("up_proj.scales", "up_proj.weight_scale"))
    }
    save_file(weights | scales, folder / "model.safetensors")
    assert draw() != first
