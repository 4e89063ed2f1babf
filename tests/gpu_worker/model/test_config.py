"""config.json and weights: what is wrong or unsupported is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from gpu_worker.model.families import read_config
from gpu_worker.model.loader import fingerprint
from gpu_worker.model.rope import Rope
from shared.errors import ConfigError
from tests.gpu_worker.model.plans import make_runner

MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True
}  # fmt: skip

PHI3: dict[str, Any] = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2
}  # fmt: skip
MIXTRAL: dict[str, Any] = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
GEMMA2: dict[str, Any] = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
GEMMA3: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}


@pytest.fixture
def folder(llama_folder: Path, tmp_path: Path) -> Path:
    """A copy of the `test` model to spoil."""
    return Path(shutil.copytree(llama_folder, tmp_path / "model"))


def edit(folder: Path, **changes: Any) -> None:
    """Change values of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "MambaForCausalLM is not supported: .*; supported: .*Llama.*Qwen3Moe",
        ),
        ({"architectures": None}, "architectures = None: must name one"),
        ({"hidden_size": "64"}, "hidden_size = '64': must be a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"vocab_size": None}, "vocab_size = None"),
        ({"num_key_value_heads": 3}, "must divide num_attention_heads = 4"),
        ({"rms_norm_eps": -1}, "rms_norm_eps = -1: must be a positive number"),
        ({"hidden_act": "gelu"}, "only silu"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no': must be true or false"),
        ({"use_sliding_window": True}, "use_sliding_window = True: LlamaForCausalLM has no sliding window"),
        ({"sliding_window": 64}, "sliding_window = 64: LlamaForCausalLM has no sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "all layers are full_attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention is not supported"),
        ({"layer_types": ["full_attention"]}, "must name a kind for each of 2 layers"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window = 0: must be a positive whole number"),
        (MISTRAL | {"sliding_window": -5}, "sliding_window = -5"),
        (MISTRAL | {"sliding_window": 4.5}, "sliding_window = 4.5"),
        (MISTRAL | {"sliding_window": True}, "sliding_window = True"),
        (QWEN2 | {"sliding_window": "64"}, "sliding_window = '64'"),
        (QWEN2 | {"sliding_window": 64, "max_window_layers": -1}, "max_window_layers = -1"),
        (QWEN2 | {"use_sliding_window": 1}, "use_sliding_window = 1: must be true or false"),
        (
            QWEN2 | {"use_sliding_window": False, "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types = .* all layers are full_attention",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "bits = None: only 4 is supported for awq"),
        ({"rope_scaling": {"rope_type": "su", "factor": 4.0}}, "'su' is not supported; supported: default, linear"),
        ({"rope_parameters": "yarn"}, "rope_parameters = 'yarn': must be an object"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor = '4': must be a positive number"),
        ({"rope_scaling": {"type": "llama3", "high_freq_factor": 1.0}}, "must be more than low_freq_factor = 1.0"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "short_factor = .* a list of 8 positive numbers",
        ),
        (PHI3 | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "type = 'linear': only default and longrope"),
        (GEMMA2 | {"hidden_activation": "gelu"}, "hidden_activation = 'gelu': only gelu_pytorch_tanh is supported"),
        (GEMMA2 | {"attn_logit_softcapping": -1}, "attn_logit_softcapping = -1: must be a positive number"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention = True: only false"),
        (GEMMA3 | {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping = 5.0: only null"),
        (MIXTRAL | {"num_local_experts": 1}, "num_experts_per_tok = 2: there are 1 experts"),
        (QWEN3_MOE | {"mlp_only_layers": 1}, "mlp_only_layers = 1: must be a list of layers"),
        (QWEN3 | {"layer_types": ["sliding_attention"] * 2}, "all layers are full_attention"),
        (PHI3 | {"partial_rotary_factor": 0.1}, "partial_rotary_factor = 0.1: must turn an even number of a head's 16"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: only 1 is supported"),
    ],
)
def test_bad_config_is_refused(changes: dict[str, Any], message: str, folder: Path) -> None:
    """The error should name what is wrong."""
    edit(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        read_config(folder)


@pytest.mark.parametrize(
    "changes",
    [
        MISTRAL | {"sliding_window": 64},
        MISTRAL,
        PHI3 | {"sliding_window": 64},
        PHI3,
        MIXTRAL | {"sliding_window": 64},
        MIXTRAL,
        QWEN3 | {"use_sliding_window": True, "max_window_layers": 1},
        QWEN3 | {"sliding_window": 64},
        QWEN3_MOE | {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 64},
        QWEN3_MOE | {"sliding_window": 64},
        GEMMA2 | {"num_hidden_layers": 5},
        GEMMA2 | {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]},
        GEMMA3 | {"num_hidden_layers": 13, "sliding_window": 64},
        GEMMA3 | {"num_hidden_layers": 5, "sliding_window_pattern": 3},
        QWEN2 | {"sliding_window": 64, "max_window_layers": 0},
        QWEN2 | {"sliding_window": 64, "max_window_layers": 1},
        QWEN2 | {"sliding_window": 64},
        QWEN2 | {"max_window_layers": 1},
        QWEN2 | {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0},
        QWEN2 | {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    ],
)
def test_windows_are_those_of_transformers(changes: dict[str, Any], folder: Path) -> None:
    """Each layer should have the window that transformers gives it, also where config.json says nothing."""
    edit(folder, **changes)
    config = AutoConfig.from_pretrained(folder)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    expected = tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    assert read_config(folder).windows == expected


def test_null_is_no_window(folder: Path) -> None:
    """A Mistral whose `sliding_window` is null should see the whole context."""
    edit(folder, **MISTRAL)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": None}))
    assert read_config(folder).windows == (None, None)


def test_a_window_as_long_as_the_context_is_none(folder: Path) -> None:
    """A window that hides nothing should not count as one."""
    edit(folder, **MISTRAL, sliding_window=100)
    assert make_runner(folder, max_model_len=101).window == 100
    assert make_runner(folder, max_model_len=100).window == 0


def test_both_spellings_of_rope(folder: Path) -> None:
    """`rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before) should read the same."""
    edit(folder, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    old = read_config(folder)
    edit(folder, rope_theta=None, rope_scaling=None,
         rope_parameters={"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0})  # fmt: skip
    assert old == read_config(folder)
    assert old.ropes == (Rope(kind="linear", theta=5e5, size=16, factor=2.0),) * 2


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_older_names_of_longrope(name: str, folder: Path) -> None:
    """A Phi-3 should read the same under each name that its kind of rotary embedding has had."""
    factors = [1.0 + i / 8 for i in range(8)]
    scaling = {"type": name, "short_factor": factors, "long_factor": factors}
    edit(folder, **PHI3, rope_scaling=scaling, original_max_position_embeddings=512)
    rope = read_config(folder).ropes[0]
    assert (rope.kind, rope.original_len, rope.factor) == ("longrope", 512, 8.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_theta": None},
        {"rope_theta": None, "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
    ],
)
def test_two_ropes_of_gemma3(changes: dict[str, Any], folder: Path) -> None:
    """Layers with a window and those without should turn as in transformers, in the new spelling and the old."""
    edit(folder, **GEMMA3, **changes, sliding_window_pattern=2)
    ropes, expected = read_config(folder).ropes, AutoConfig.from_pretrained(folder).rope_parameters
    for rope, kind in zip(ropes, ("sliding_attention", "full_attention"), strict=True):
        found = {"rope_type": rope.kind, "rope_theta": rope.theta}
        found |= {"factor": rope.factor} if rope.kind == "linear" else {}
        assert expected[kind] == found


def test_not_a_model_folder(tmp_path: Path) -> None:
    """A folder without or with a broken config.json should be named."""
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_config(tmp_path)


def test_missing_and_unexpected_weights_are_named(folder: Path) -> None:
    """A tensor too few, too many or of another shape should be refused by its name."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    for changed, message in (
        ({k: v for k, v in weights.items() if k != "model.norm.weight"}, r"no tensor model\.norm\.weight"),
        (weights | {"model.extra.weight": torch.zeros(1)}, r"no place for model\.extra\.weight"),
        (weights | {"model.norm.weight": torch.zeros(3)}, r"model\.norm\.weight is \[3\].*asks for \[64\]"),
        (weights | {"model.norm.weight": torch.zeros(64, dtype=torch.int8)}, "does not say how it is quantized"),
    ):
        save_file(changed, path)
        with pytest.raises(ConfigError, match=message):
            make_runner(folder)


def test_only_safetensors_are_read(folder: Path) -> None:
    """A truncated file, a pickle, an index with a missing shard should be refused; nothing is unpickled."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        make_runner(folder)
    path.rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no model\.safetensors \(found pytorch_model\.bin"):
        make_runner(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "shard-1.safetensors"}}))
    with pytest.raises(ConfigError, match=r"names shard-1\.safetensors, not in the folder"):
        make_runner(folder)


def test_shards_equal_one_file(folder: Path, llama_folder: Path) -> None:
    """A checkpoint in shards should load like one in a single file."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    weight_map = {name: f"shard-{i % 2}.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({name: weights[name] for name in names if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert make_runner(folder).max_model_len == make_runner(llama_folder).max_model_len


def test_fingerprint_tells_weights_config_and_dtype_apart(folder: Path) -> None:
    """Equal folders and dtypes should have equal fingerprints, any difference another one."""
    first = fingerprint(folder, "float32")
    assert first == fingerprint(folder, "float32")
    seen = {first, fingerprint(folder, "bfloat16")}
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))
    seen.add(fingerprint(folder, "float32"))
    edit(folder, rope_theta=12345.0)
    seen.add(fingerprint(folder, "float32"))
    assert len(seen) == 4


def test_fingerprint_tells_how_many_ids_may_be_drawn(folder: Path) -> None:
    """The same weights with fewer tokens should be another model, since other ids are drawn."""
    whole = make_runner(folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"].pop()
    file.write_text(json.dumps(tokenizer))
    less = make_runner(folder)
    assert less.vocab_size == whole.vocab_size - 1
    assert less.fingerprint != whole.fingerprint


def test_flags_are_checked_against_the_model(folder: Path) -> None:
    """A context beyond the model's and a missing device should be refused with the remedy."""
    with pytest.raises(ConfigError, match=r"--max-model-len=9999: the model's longest context is 4096"):
        make_runner(folder, max_model_len=9999)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="--device=cuda"):
            make_runner(folder, device="cuda")
    edit(folder, torch_dtype="float8_e4m3fn")
    with pytest.raises(ConfigError, match="choose one with --dtype"):
        make_runner(folder, dtype="auto")


def test_runner_describes_itself(folder: Path) -> None:
    """The card should hold the checkpoint's dtype, and the tokenizer's size where the logits are wider (case 50)."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = tokenizer["added_tokens"][:2]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    runner = make_runner(folder, dtype="auto", max_model_len=100)
    assert (runner.dtype, runner.device, runner.vocab_size, runner.max_model_len) == ("bfloat16", "cpu", 511, 100)
    (folder / "tokenizer.json").unlink()
    assert make_runner(folder).vocab_size == 512
