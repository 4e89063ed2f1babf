"""What of quantized checkpoints cannot be loaded is refused at the start, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.model.families import read_config
from shared.errors import ConfigError
from tests.gpu_worker.model.plans import make_runner
from tests.gpu_worker.quant.checkpoints import FORMS, compressed, edit_config, write_quantized

AWQ, GPTQ, FP8 = (FORMS[name].config for name in ("awq 32", "gptq 64", "fp8 plain"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quantized(FORMS["gptq desc_act"], tmp_path_factory.mktemp("gptq"))


def ints(**changes: Any) -> dict[str, Any]:
    """compressed-tensors of int4 in groups, but for `changes` of the weights' arguments."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    return compressed("pack-quantized", **weights | changes)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method = 'bitsandbytes': is not supported; supported: awq, gptq"),
        (AWQ | {"bits": 8}, "bits = 8: only 4 is supported for awq"),
        (AWQ | {"version": "gemv"}, "version = 'gemv': only gemm"),
        (AWQ | {"group_size": 48}, "group_size = 48: must be one of 32, 64, 128, -1"),
        (GPTQ | {"bits": 3}, "bits = 3: only 4 is supported for gptq"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin': only gptq and gptq_v2"),
        (GPTQ | {"dynamic": {"-:.*": {}}}, "dynamic = .*: settings of single modules"),
        (FP8 | {"weight_block_size": [128, 128]}, "weight_block_size = .*: scales of blocks are not supported"),
        (FP8 | {"fmt": "e5m2"}, "fmt = 'e5m2': only e4m3"),
        (ints(num_bits=3), "num_bits = 3: of type int is not supported"),
        (ints(group_size=16), "group_size = 16"),
        (ints(num_bits=8), "strategy = 'group': only channel and tensor are supported for int8"),
        (ints(num_bits=8, strategy="channel", symmetric=False), "symmetric = False: zero points are not supported"),
        (ints() | {"format": "marlin-24"}, "format = 'marlin-24': only pack-quantized"),
        (ints() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme = .*: is not supported"),
        (ints() | {"sparsity_config": {"format": "sparse-24"}}, "sparse weights are not supported"),
        (ints() | {"config_groups": {"a": {}, "b": {}}}, "config_groups = .*: must be one group"),
    ],
)
def test_what_is_not_built_is_named(config: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    """A scheme that this version does not read should be refused with its key and value."""
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize("wanted", ["int8", "awq"])
def test_another_quantization_is_refused(wanted: str, folder: Path) -> None:
    """`--quantization` should name what the checkpoint is, or nothing."""
    with pytest.raises(ConfigError, match=f"--quantization={wanted}: the checkpoint is quantized already, by gptq"):
        make_runner(folder, quantization=wanted)
    make_runner(folder, quantization="gptq", cpu_kernels="off")
    with pytest.raises(ConfigError, match=r"--quantization=gptq: .* no quantization_config"):
        make_runner(folder.parent / "floats", quantization="gptq")


def test_cuda_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU worker should say at its start that it has no kernels for such weights."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"--device=cuda: the checkpoint is quantized \(gptq, int4\)"):
        make_runner(folder, device="cuda")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qweight", lambda t: t[:-1], r"q_proj.qweight is \[15, 128\], config.json asks for \[16, 128\]"),
        ("g_idx", torch.zeros_like, "q_proj.g_idx does not give each group 32 columns"),
        ("g_idx", lambda t: t.flip(0), "must have the same g_idx"),
        ("g_idx", lambda t: t.float(), "g_idx is torch.float32; must be torch.int32 or torch.int64"),
        ("qweight", lambda t: t.view(torch.float32), "qweight is torch.float32; must be torch.int32"),
        ("qzeros", lambda t: t.to(torch.int16), "qzeros is torch.int16; must be torch.int32"),
        ("g_idx", None, "no tensor model.layers.0.self_attn.q_proj.g_idx"),
        ("qzeros", None, "no tensor model.layers.0.self_attn.q_proj.qzeros"),
        ("scales", lambda t: t.float() + 1e6, "q_proj: a scale is not finite in float16"),
    ],
)
def test_broken_tensors_are_named(name: str, change: Any, message: str, folder: Path, tmp_path: Path) -> None:
    """A tensor of another shape or meaning should be refused by its name."""
    weights = load_file(folder / "model.safetensors")
    full = f"model.layers.0.self_attn.q_proj.{name}"
    changed = {} if change is None else {full: change(weights[full]).contiguous()}
    save_file({key: t for key, t in weights.items() if key != full} | changed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        make_runner(tmp_path, cpu_kernels="off")


def test_half_a_joined_projection_is_refused(tmp_path: Path) -> None:
    """Queries in integers beside keys in floats can't be computed as one."""
    folder = write_quantized(FORMS["awq 32"], tmp_path)
    floats = load_file(folder.parent / "floats" / "model.safetensors")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj."
    kept = {key: tensor for key, tensor in weights.items() if not key.startswith(name)}
    save_file(kept | {name + "weight": floats[name + "weight"]}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="must all be quantized, or none of them"):
        make_runner(folder, cpu_kernels="off")
    edit_config(folder, quantization_config=None)
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.0\.self_attn\.q_proj\.weight"):
        make_runner(folder, cpu_kernels="off")
