"""`quire quantize`: what it writes is read back, by the formats' definition, and AWQ beats plain rounding."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from gpu_worker.model.families import read_config
from gpu_worker.model.loader import Checkpoint
from gpu_worker.model.weights import MlpWeights, Projection, read_layer
from gpu_worker.quant import output
from gpu_worker.quant.awq import search_layer
from gpu_worker.quant.calibration import Calibration
from gpu_worker.quant.making import Recipe, _Making, make_checkpoint
from gpu_worker.quant.rounding import awq_tensors, packed_tensors, round_to_groups
from shared.errors import ConfigError
from tests.gpu_worker.model.plans import give_blocks, make_runner, make_sequence, plan_step
from tests.gpu_worker.model.tiny_families import FAMILIES, write_tiny_model
from tests.gpu_worker.quant.checkpoints import AWQ_ORDER, LLAMA, pack_int32


def draw_text(seed: int, length: int) -> list[int]:
    """Random token ids."""
    rng = random.Random(seed)
    return [rng.randrange(320) for _ in range(length)]


WINDOWS = [draw_text(i, 64) for i in range(12)]
BIASED = LLAMA | {"model_type": "qwen2"}
NORMED = LLAMA | {"model_type": "qwen3", "head_dim": 32}


def write_uneven_model(model: dict[str, object], folder: Path) -> Path:
    """A tiny model in which some channels count far more than others, as in trained ones."""
    write_tiny_model(model, folder)
    (folder / "chat_template.jinja").write_text("{}")
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(8)
    for name, weight in weights.items():
        if "layernorm" in name:
            factors = torch.exp(torch.randn(len(weight), generator=generator))
            weight.mul_(factors / factors.square().mean().sqrt())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_uneven_model(LLAMA, tmp_path_factory.mktemp("source") / "model")


def make(source: Path, out: Path, method: str, group: int = 64) -> Path:
    lines: list[str] = []
    num_bytes = make_checkpoint(source, out, Recipe(method=method, group=group), WINDOWS, lines.append)
    assert num_bytes == sum(tensor.nbytes for path in out.glob("*.safetensors") for tensor in load_file(path).values())
    assert "layer 2 of 2" in lines
    return out


def logits_of(folder: Path) -> Tensor:
    """After each of 64 texts that were not calibrated with, [texts, vocab]."""
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 64 * 24}
    runner = make_runner(folder, cpu_kernels="off", dtype="float32", max_model_len=100, **settings)
    sequences = [make_sequence(draw_text(99 + i, 24)) for i in range(64)]
    give_blocks(sequences, runner.block_size, 25)
    return runner.compute_logits(plan_step(sequences, 24, 64 * 24)).clone()


def divergence(expected: Tensor, actual: Tensor) -> float:
    """Mean of what a text drawn from `expected` loses in log-likelihood: the change of its log perplexity."""
    p = expected.softmax(-1)
    return float((p * (expected.log_softmax(-1) - actual.log_softmax(-1))).sum(-1).mean())


@pytest.mark.parametrize("model", [LLAMA, BIASED, NORMED], ids=["llama", "qwen2", "qwen3"])
def test_awq_beats_plain_rounding(model: dict[str, object], tmp_path: Path) -> None:
    """At the same bits the text that the model draws itself should be likelier with AWQ than with plain rounding."""
    source = write_uneven_model(model, tmp_path / "source")
    expected = logits_of(source)
    losses = {m: divergence(expected, logits_of(make(source, tmp_path / m, m))) for m in ("awq", "int4", "int8")}
    assert 0 < losses["awq"] < 0.85 * losses["int4"]
    assert losses["int8"] < losses["awq"]


def test_tensors_are_those_of_the_formats() -> None:
    """What is written should be what the formats' definition packs."""
    rounded = round_to_groups(torch.randn(24, 128), 32)
    numbers, zeros = rounded.numbers.flatten(1), rounded.zeros.squeeze(-1)
    awq, packed = awq_tensors(rounded), packed_tensors(rounded)
    assert torch.equal(pack_int32(numbers.T, AWQ_ORDER), awq["qweight"])
    assert torch.equal(pack_int32(zeros.T, AWQ_ORDER), awq["qzeros"])
    assert torch.equal(pack_int32(numbers), packed["weight_packed"])
    assert torch.equal(pack_int32(zeros.T).T, packed["weight_zero_point"])
    assert (awq["scales"].shape, packed["weight_scale"].shape) == ((4, 24), (24, 4))


def test_rounding_is_to_the_nearest() -> None:
    """No number should be off by more than half a step, at the ends of its group also by what float16 rounds off 15
    steps; groups of zeros or of one sign should not break."""
    weight = torch.randn(16, 64)
    weight[0] = 0
    weight[1] = weight[1].abs() + 5
    rounded = round_to_groups(weight, 32)
    off = (rounded.floats() - weight).abs().view(16, 2, 32)
    assert bool((off <= (0.5 + 15 * 2**-11) * rounded.scales.float() + 1e-6).all())
    assert bool(rounded.floats()[0].eq(0).all())


@pytest.mark.parametrize("model", [LLAMA, BIASED], ids=["llama", "qwen2"])
def test_scales_change_no_result(model: dict[str, object], tmp_path: Path) -> None:
    """A layer should compute the same with what scales were folded into, biases and shared key heads among it."""
    source = write_uneven_model(model, tmp_path / "source")
    config = read_config(source)
    checkpoint = Checkpoint(source, dtype=torch.float32, device=torch.device("cpu"))
    making = _Making(config, checkpoint, Recipe(method="awq", group=32))
    floats = replace(making._float_layer(0), norm_dtype=torch.float32)
    embedding = checkpoint.take_stored("model.embed_tokens.weight")
    before, after = (Calibration(config, WINDOWS, embedding) for _ in range(2))
    weights = read_layer(config, checkpoint, 0)
    search_layer(floats, before.advance(0, weights), 32)
    w, b = floats.linears, floats.biases
    bias = torch.cat([b[part] for part in "qkv"]) if b else None
    scaled = replace(
        weights,
        input_norm=floats.input_norm,
        mlp_norm=floats.mlp_norm,
        qkv=Projection(weight=torch.cat([w[part] for part in "qkv"]), bias=bias),
        output=Projection(weight=w["o"]),
        mlp=(MlpWeights(**{part: Projection(weight=w[part]) for part in ("gate", "up", "down")}),),
    )
    assert not torch.equal(scaled.input_norm, weights.input_norm)
    after.advance(0, scaled)
    torch.testing.assert_close(before._residual, after._residual, rtol=1e-3, atol=1e-3)


def test_folder_is_a_whole_checkpoint(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other files should be copied, config.json say how weights are stored, and shards be indexed."""
    monkeypatch.setattr(output.CheckpointWriter.__init__, "__defaults__", (60_000,))
    folder = make(source, tmp_path / "int4", "int4")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    assert (folder / "chat_template.jinja").read_text() == "{}"
    assert not list(folder.glob(".shard*"))
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 64
    assert logits_of(folder).isfinite().all()


@pytest.mark.parametrize("method", ["awq", "int4"])
def test_a_group_that_does_not_divide_is_refused(method: str, tmp_path: Path) -> None:
    """The error should name those that do, before anything is written."""
    source = write_tiny_model(FAMILIES["qwen3"], tmp_path / "source")
    with pytest.raises(ConfigError, match=r"--group-size=64: does not divide .*\[64, 96, 128\]; those that do: 32, -1"):
        make_checkpoint(source, tmp_path / "out", Recipe(method=method, group=64), WINDOWS, print)
    assert not (tmp_path / "out").exists()


def test_what_is_not_built_is_refused(source: Path, tmp_path: Path) -> None:
    """Experts, and a checkpoint that is quantized already, should be refused by name."""
    experts = write_tiny_model(FAMILIES["mixtral"], tmp_path / "mixtral")
    with pytest.raises(ConfigError, match="MixtralForCausalLM has experts, which `quire quantize` is not built for"):
        make_checkpoint(experts, tmp_path / "out", Recipe(method="int8", group=-1), [], print)
    made = make(source, tmp_path / "int8", "int8")
    with pytest.raises(ConfigError, match="quantized already, by compressed-tensors"):
        make_checkpoint(made, tmp_path / "out", Recipe(method="int8", group=-1), [], print)


def test_numbers_beyond_float16_are_refused(source: Path, tmp_path: Path) -> None:
    """AutoAWQ's checkpoints are float16: what does not fit should be named, and nothing be left behind."""
    folder = tmp_path / "source"
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = 1e6
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"--method=awq: model\.norm\.weight holds numbers beyond float16"):
        make_checkpoint(folder, tmp_path / "out", Recipe(method="awq", group=64), WINDOWS, print)
    assert not list((tmp_path / "out").iterdir())


def test_int8_is_what_transformers_computes(source: Path, tmp_path: Path) -> None:
    """The integers times their scales, as floats in `transformers`, should give our logits, as near as activations of
    int8 are."""
    folder = make(source, tmp_path / "int8", "int8")
    weights = load_file(folder / "model.safetensors")
    floats = {name: tensor for name, tensor in weights.items() if not name.endswith("weight_scale")}
    for name in [name for name in weights if name.endswith("weight_scale")]:
        own = name.removesuffix("_scale")
        floats[own] = weights[own].float() * weights[name]
    plain = tmp_path / "plain"
    shutil.copytree(source, plain)
    save_file(floats, plain / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    texts = [draw_text(99 + i, 24) for i in range(64)]
    with torch.inference_mode():
        expected = model(torch.tensor(texts)).logits[:, -1]
    assert torch.cosine_similarity(expected, logits_of(folder), dim=1).mean() > 0.995
