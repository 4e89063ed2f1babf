"""Random-weight checkpoints."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from quire.bench.model_shapes import SHAPES
from quire.bench.random_model import write_random_model


@pytest.mark.parametrize("name", ["test", "test_qwen2", "tiny"])
def test_files_agree(name: str, tmp_path: Path) -> None:
    """Config, weights and tokenizer should have the sizes of the shape."""
    shape, out = SHAPES[name], write_random_model(name, tmp_path / "model")
    weights = load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    assert Tokenizer.from_file(str(out / "tokenizer.json")).get_vocab_size() == shape.tokenizer_size
    assert weights["model.embed_tokens.weight"].shape == (shape.vocab_size, shape.hidden_size)
    assert config["vocab_size"] == shape.vocab_size
    assert ("lm_head.weight" in weights) == (not shape.is_tied)
    assert all(w.dtype == torch.bfloat16 and bool(w.isfinite().all()) for w in weights.values())


def test_every_byte_is_a_token(tmp_path: Path) -> None:
    """Any text should survive encoding and decoding, and each single byte should have its own token."""
    out = write_random_model("test", tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    text = "plain, 🌍你ь👩‍👩‍👧 \x00\x7f é\n\t"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert sum(len(token) == 1 for token in tokenizer.get_vocab()) == 256


def test_same_seed_same_weights(tmp_path: Path) -> None:
    """The same seed should give the same weights, another seed others."""
    first, again, other = (
        load_file(write_random_model("test", tmp_path / str(i), seed=seed) / "model.safetensors")
        for i, seed in enumerate((1, 1, 2))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_logits_may_be_wider_than_the_tokenizer(tmp_path: Path) -> None:
    """A shape with padded ids should keep the special tokens at the end of the tokenizer, not of the logits."""
    shape = dataclasses.replace(SHAPES["test"], vocab_size=576)
    out = write_random_model(shape, tmp_path / "model")
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 509
    assert Tokenizer.from_file(str(out / "tokenizer.json")).get_vocab_size() == 512


def test_unknown_shape_is_refused(tmp_path: Path) -> None:
    """An unknown name should be refused with the names there are."""
    with pytest.raises(ValueError, match="q05b, tiny, test"):
        write_random_model("huge", tmp_path / "model")
