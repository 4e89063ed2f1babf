"""Rotary frequencies of every kind against `transformers`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gateway.model_folder import load_model_folder
from gpu_worker.model.families import read_config
from gpu_worker.model.rope import inverse_frequencies, rotary_table
from shared.errors import ConfigError
from tests.gpu_worker.model.plans import generate, give_blocks, make_runner, make_sequence
from tests.gpu_worker.model.test_runner_equality import assert_same_tokens, greedy_tokens

MAX_POSITION, NUM_TOKENS = 106, 16
PROMPT = list(range(100, 190))
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2, 2.5, 3],
            "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 9, 10, 11], "original_max_position_embeddings": 64}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3"} | LLAMA3,
    "llama3 of its context": {"rope_type": "llama3"} | LLAMA3 | {"original_max_position_embeddings": None},
    "yarn": YARN,
    "yarn original": YARN | {"original_max_position_embeddings": 24, "truncate": False},
    "yarn betas": YARN | {"beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 1.2},
    "yarn mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5, "original_max_position_embeddings": 32},
    "longrope": LONGROPE,
    "longrope factor": LONGROPE | {"factor": 3.0, "rope_theta": 500.0},
    "longrope attention": LONGROPE | {"attention_factor": 1.5},
}


def make_folder(source: Path, folder: Path, scaling: dict[str, Any]) -> Path:
    """A model with the weights of `source`, a short context and `rope_scaling`."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    scaling = {key: value for key, value in scaling.items() if value is not None}
    (folder / "config.json").unlink()
    changes = {"rope_scaling": scaling, "max_position_embeddings": MAX_POSITION}
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_those_of_transformers(kind: str, llama_folder: Path, tmp_path: Path) -> None:
    """Frequencies and the factor of cos and sin should be transformers' for a text as long as the longest one."""
    folder = make_folder(llama_folder, tmp_path / "model", KINDS[kind])
    config, (rope, _) = AutoConfig.from_pretrained(folder), read_config(folder).ropes
    for model_len in (32, 64, 65, MAX_POSITION, 2 * MAX_POSITION):
        init = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]]
        expected, factor = init(config, torch.device("cpu"), seq_len=model_len)
        torch.testing.assert_close(inverse_frequencies(rope, model_len), expected, rtol=1e-6, atol=0)
        angles = torch.arange(model_len)[:, None] * expected
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * factor
        torch.testing.assert_close(rotary_table(rope, 16, model_len, torch.device("cpu")), table, rtol=0, atol=2e-5)


def reference_at(folder: Path, model_len: int) -> tuple[list[int], list[float]]:
    """What transformers draws with the frequencies that it has for a text of `model_len` tokens, from the start."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    rotary = model.model.rotary_emb
    if rotary.rope_type == "dynamic":
        frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](model.config, torch.device("cpu"), seq_len=model_len)
        rotary.inv_freq, rotary.original_inv_freq = frequencies, frequencies.clone()
        rotary.max_seq_len_cached = rotary.original_max_seq_len = model_len
    return greedy_tokens(model, PROMPT, NUM_TOKENS)


@pytest.mark.parametrize(
    ("kind", "model_len", "kernels"),
    [
        ("linear", MAX_POSITION, "off"),
        ("llama3", MAX_POSITION, "off"),
        ("yarn mscale", 110, "off"),
        ("yarn original", MAX_POSITION, "on"),
        ("dynamic", 180, "off"),
        ("longrope", MAX_POSITION, "on"),
    ],
)
def test_tokens_equal_transformers(
    kind: str, model_len: int, kernels: str, *, llama_folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Stretched rotary embeddings should give the tokens that `transformers` gives, and others than plain ones."""
    if kernels == "on":
        request.getfixturevalue("cpu_kernels")
    folder = make_folder(llama_folder, tmp_path / "model", KINDS[kind])
    sequence, plain = make_sequence(PROMPT), make_sequence(PROMPT)
    give_blocks([sequence], 16, 128)
    give_blocks([plain], 16, 128)
    runner = make_runner(folder, max_model_len=model_len, cpu_kernels=kernels)
    (output,) = generate(runner, [sequence], NUM_TOKENS, chunk_size=40)
    assert_same_tokens(*reference_at(folder, model_len), output)
    assert output != generate(make_runner(llama_folder), [plain], NUM_TOKENS)[0]


def test_what_depends_on_length_is_chosen_once(
    llama_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers whose longest texts ask for other frequencies should say so and have other fingerprints, so that no
    sequence moves between them."""
    caplog.set_level(logging.INFO)
    folder = make_folder(llama_folder, tmp_path / "model", LONGROPE)
    short, border, long, longer = (make_runner(folder, max_model_len=n).fingerprint for n in (40, 64, 65, MAX_POSITION))
    assert "frequencies=short" in caplog.text
    assert "frequencies=long" in caplog.text
    assert (short, long) == (border, longer)
    assert short != long
    dynamic = make_folder(llama_folder, tmp_path / "dynamic", KINDS["dynamic"])
    marks = {make_runner(dynamic, max_model_len=n).fingerprint for n in (40, 106, 107, 212)}
    assert len(marks) == 3
    with pytest.raises(ConfigError, match=r"--max-model-len=213: the model's longest context is 212"):
        make_runner(dynamic, max_model_len=213)
    assert make_runner(dynamic).max_model_len == MAX_POSITION


@pytest.mark.parametrize("kind", KINDS)
def test_gateways_allow_the_same_length(kind: str, llama_folder: Path, tmp_path: Path) -> None:
    """A gateway should allow texts as long as a worker does."""
    folder = make_folder(llama_folder, tmp_path / "model", KINDS[kind])
    expected = {"dynamic": 2 * MAX_POSITION, "yarn": 4 * MAX_POSITION, "yarn betas": 4 * MAX_POSITION,
                "yarn mscale": 128}.get(kind, MAX_POSITION)  # fmt: skip
    assert expected == read_config(folder).longest_len
    assert expected == load_model_folder(folder).longest_text
