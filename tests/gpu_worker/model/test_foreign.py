"""Every architecture that the code of `transformers` computes over our KV cache, against `transformers` by itself."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gpu_worker.engine.engine import Engine
from gpu_worker.model.assembly import read_config
from gpu_worker.model.families import FAMILIES
from gpu_worker.model.runner import DecoderRunner
from gpu_worker.model.transformers_config import MISFITS, WHITELIST
from gpu_worker.model.transformers_decoder import TransformersDecoder
from gpu_worker.service import make_engine
from shared.clock import ManualClock
from shared.config import EngineConfig
from shared.errors import ConfigError
from tests.gpu_worker.model.plans import make_runner
from tests.gpu_worker.model.test_runner_equality import assert_same_tokens, greedy_tokens
from tests.gpu_worker.model.test_window import NUM_TOKENS, prompt_logits, serve
from tests.gpu_worker.model.tiny_foreign import FOREIGN, write_foreign_model

BLOCK_SIZE, MAX_LEN = 8, 160
PROMPT_LENS = (3, 41, 90, 130)
NUM_BLOCKS = 21
"""168 tokens of 344: one sequence is evicted."""
QUICK = (
    "Cohere2ForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "GraniteMoeForCausalLM",
    "LlamaForCausalLM",
    "OPTForCausalLM",
    "Olmo3ForCausalLM",
    "Starcoder2ForCausalLM",
)
"""Unlike one another: learned positions, windows in some or all layers, experts, parallel blocks, Conv1D. The others
have the same test."""
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The checkpoint of an architecture, made once."""
    root = tmp_path_factory.mktemp("foreign")

    def find(name: str) -> Path:
        return root / name if (root / name).exists() else write_foreign_model(name, root / name)

    return find


def make_prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(300) for _ in range(length)] for length in PROMPT_LENS]


def load(folder: Path, **settings: Any) -> tuple[DecoderRunner, Engine]:
    """A runner with a pool of `NUM_BLOCKS` blocks of float32, and an engine over it as a worker makes it."""
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "block_size": BLOCK_SIZE} | settings
    shape = read_config(folder, "transformers")
    num_bytes = NUM_BLOCKS * BLOCK_SIZE * 8 * shape.num_layers * shape.num_kv_heads * shape.head_size
    runner = make_runner(
        folder, max_model_len=MAX_LEN, model_impl="transformers", kv_cache_memory_bytes=num_bytes, **settings
    )
    assert isinstance(runner._model, TransformersDecoder)
    return runner, make_engine(
        runner, EngineConfig(**settings), max_model_len=MAX_LEN, clock=ManualClock(), prefix_key=b"k"
    )


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in
                                  WHITELIST])  # fmt: skip
def test_greedy_equals_transformers(name: str, folder_of: Folders) -> None:
    """Prompts cut into chunks, batched, evicted from a small pool and found in the prefix cache should get the tokens
    that they get alone there."""
    folder = folder_of(name)
    assert json.loads((folder / "config.json").read_text())["architectures"] == [name]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    runner, engine = load(folder)
    outputs = serve(engine, make_prompts())
    for prompt, output in zip(make_prompts(), outputs, strict=True):
        assert_same_tokens(*greedy_tokens(model, prompt, NUM_TOKENS), output)
    assert len({token for output in outputs for token in output}) > 8, "texts that repeat themselves show little"
    assert engine.view().num_evictions > 0
    assert serve(engine, make_prompts()) == outputs
    assert engine.view().num_prefix_hits > 0
    assert runner.num_blocks == NUM_BLOCKS


def test_the_whitelist_is_what_is_tested() -> None:
    """Each architecture of the whitelist should have a model here, own families among them, and no misfit one."""
    assert tuple(sorted(FOREIGN)) == tuple(sorted(WHITELIST)) == WHITELIST
    assert FAMILIES.keys() <= set(WHITELIST)
    assert not set(WHITELIST) & MISFITS.keys()


@pytest.mark.parametrize("name", ["Cohere2ForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM"])
def test_bits_do_not_depend_on_chunks(name: str, folder_of: Folders) -> None:
    """In float32 logits should be the same bits however a prompt is cut and whoever runs beside; in bfloat16, with a
    quantized cache and with int8 weights they should be near."""
    prompt = make_prompts()[-1]

    def logits_of(chunk_size: int, **settings: Any) -> torch.Tensor:
        runner = make_runner(
            folder_of(name), block_size=BLOCK_SIZE, model_impl="transformers", max_model_len=MAX_LEN, **settings
        )
        return prompt_logits(runner, prompt, chunk_size, is_freed=False)

    expected = logits_of(512)
    assert torch.equal(expected, logits_of(7))
    for other in ({"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}, {"quantization": "int8"}):
        near = logits_of(512, **other)
        assert not torch.equal(expected, near)
        assert torch.cosine_similarity(expected, near, dim=0) > 0.9


def test_blocks_before_the_window_are_freed(folder_of: Folders) -> None:
    """Where all layers have a window, a sequence should keep no more than it sees; where one has none, all of it."""
    assert load(folder_of("Starcoder2ForCausalLM"))[0].window == 40
    assert load(folder_of("Olmo3ForCausalLM"))[0].window == 0


def test_auto_takes_the_own_family(folder_of: Folders) -> None:
    """`auto` should take transformers only for what has no file of its own, and the fingerprint tell who computes."""
    llama = folder_of("LlamaForCausalLM")
    own, foreign = make_runner(llama), make_runner(llama, model_impl="transformers")
    assert not isinstance(own._model, TransformersDecoder)
    assert own.fingerprint != foreign.fingerprint
    assert isinstance(make_runner(folder_of("GPT2LMHeadModel"))._model, TransformersDecoder)
    with pytest.raises(ConfigError, match="--model-impl=quire: there is no family file for GPT2LMHeadModel; use auto"):
        make_runner(folder_of("GPT2LMHeadModel"), model_impl="quire")


def copy_model(source: Path, target: Path, changes: dict[str, Any]) -> Path:
    """The checkpoint with other values in config.json."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"]}, r"DeepseekV3ForCausalLM is not supported: its attention keeps a "
         r"latent \(MLA\) in place of keys and values; choose a model of another one; supported: .*GPT2LMHeadModel"),
        ({"architectures": ["NewForCausalLM"], "kv_lora_rank": 8}, r"latent \(MLA\)"),
        ({"architectures": ["NewForCausalLM"], "layer_types": ["linear_attention"]}, "keep a state in place of keys"),
        ({"architectures": ["FalconMambaForCausalLM"]}, "keep a state in place of keys"),
        ({"architectures": ["BloomForCausalLM"]}, r"a bias by distance \(ALiBi\)"),
        ({"architectures": ["GptOssForCausalLM"]}, "its attention has sinks"),
        ({"architectures": ["NewForConditionalGeneration"], "is_encoder_decoder": True}, "no decoder of text alone"),
        ({"architectures": ["NewForCausalLM"], "vision_config": {}}, "no decoder of text alone"),
        ({"architectures": ["NewForCausalLM"], "auto_map": {}}, "code of its own, and code from a model folder could"),
        ({"architectures": ["NewForCausalLM"]}, "NewForCausalLM is not supported; choose a model of another one"),
        ({"model_type": "llama"}, "model_type = 'llama': GPTNeoXForCausalLM has 'gpt_neox'"),
        ({"quantization_config": {"quant_method": "awq"}}, "not supported with --model-impl=transformers"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic': not with"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 2}, r"GPTNeoXForCausalLM does not fit --model-impl=transformers: key \[1, 4, 16\]"),
        ({"sliding_window": 40}, "sliding_window = 40: layer 0 asks for all of the context"),
        ({"intermediate_size": 80}, "transformers cannot load it: "),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], message: str, folder_of: Folders, tmp_path: Path
) -> None:
    """One line at the start should name what is wrong."""
    folder = copy_model(folder_of("GPTNeoXForCausalLM"), tmp_path / "model", changes)
    with pytest.raises(ConfigError, match=message) as caught:
        make_runner(folder, max_model_len=MAX_LEN)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda tensors: tensors.pop("gpt_neox.final_layer_norm.weight"), "no tensor gpt_neox.final_layer_norm.weight"),
        (lambda tensors: tensors.update(other=torch.zeros(2)), "the model has no place for other"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    spoil: Callable[[dict[str, torch.Tensor]], object], message: str, folder_of: Folders, tmp_path: Path
) -> None:
    """No weight should be made up or left out in silence."""
    folder = copy_model(folder_of("GPTNeoXForCausalLM"), tmp_path / "model", {})
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        make_runner(folder)


def test_progress_is_in_the_log(
    folder_of: Folders, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    """Loading should say in our log how far it is, and print no bars."""
    folder = folder_of("GPT2LMHeadModel")
    capfd.readouterr()
    monkeypatch.setattr("gpu_worker.model.transformers_decoder.PROGRESS_PAUSE_S", 0.0)
    caplog.set_level("INFO")
    make_runner(folder)
    assert "weights.loading tensors=1/41" in caplog.text
    assert "weights.loaded" in caplog.text
    assert "Loading weights" not in "".join(capfd.readouterr())


def test_only_safetensors_are_read(folder_of: Folders, tmp_path: Path) -> None:
    """Weights in a format that can hold code should be refused, with the reason."""
    folder = copy_model(folder_of("GPTNeoXForCausalLM"), tmp_path / "model", {})
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no model.safetensors \(found pytorch_model.bin, .* could run code"):
        make_runner(folder)
