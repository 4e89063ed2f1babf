"""The number of token ids, read from tokenizer.json, and that no other id is drawn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models

from gpu_worker.model.runner import DecoderRunner
from gpu_worker.model.vocabulary import tokenizer_size
from shared.errors import ConfigError
from tests.gpu_worker.model.plans import generate, give_blocks, make_runner, make_sequence

NUM_TOKENS = 400
WORDS = {"[UNK]": 0, "the": 1, "cat": 7}
MODELS = {
    "BPE": models.BPE(WORDS, []),
    "WordPiece": models.WordPiece(WORDS, unk_token="[UNK]"),
    "WordLevel": models.WordLevel(WORDS, unk_token="[UNK]"),
    "Unigram": models.Unigram([("<unk>", 0.0), ("the", -1.0), ("cat", -2.0)], 0, False),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("added", [[], ["the"], ["<end>", "<begin>"]])
def test_the_size_is_the_librarys(tmp_path: Path, kind: str, added: list[str]) -> None:
    """For every kind of model, with and without added tokens, the size should be the largest known id and one."""
    tokenizer = Tokenizer(MODELS[kind])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in added])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_size(tmp_path / "tokenizer.json") == max(tokenizer.get_vocab().values()) + 1


def test_no_tokenizer_has_no_size(tmp_path: Path) -> None:
    """A folder without a tokenizer should have none."""
    assert tokenizer_size(tmp_path / "tokenizer.json") is None


@pytest.mark.parametrize("content", ["", "{}", "[]", json.dumps({"model": {"vocab": {"a": "b"}}})])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    """What cannot be read should be refused with the file's name."""
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer"):
        tokenizer_size(tmp_path / "tokenizer.json")


@pytest.fixture
def padded_folder(llama_folder: Path, tmp_path: Path) -> Path:
    """A model whose likeliest tokens by far are those that no tokenizer has: rows that fill its vocabulary up."""
    folder = Path(shutil.copytree(llama_folder, tmp_path / "padded"))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][NUM_TOKENS:] *= 50.0
    Tokenizer(models.BPE({f"t{i}": i for i in range(NUM_TOKENS)}, [])).save(str(folder / "tokenizer.json"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def drawn_by(runner: DecoderRunner) -> set[int]:
    """Ids that are drawn greedily, by chance, with top_k and beside alternatives; and those alternatives' own."""
    ways: list[dict[str, object]] = [
        {}, {"temperature": 1.5}, {"temperature": 1.0, "top_k": 5}, {"temperature": 1.0, "num_logprobs": 5},
        {"repetition_penalty": 1.2},
    ]  # fmt: skip
    sequences = [make_sequence([5, 9, 30], seed=number, **way) for number, way in enumerate(ways)]
    give_blocks(sequences, runner.block_size, 32)
    return {token for tokens in generate(runner, sequences, 20) for token in tokens}


@pytest.mark.parametrize("way", ["off", "on", "transformers"])
def test_no_token_without_text_is_drawn(way: str, padded_folder: Path, request: pytest.FixtureRequest) -> None:
    """However likely, an id that the tokenizer has no token for should never be drawn."""
    if way == "on":
        request.getfixturevalue("cpu_kernels")
    runner = make_runner(padded_folder, **{"model_impl": way} if way == "transformers" else {"cpu_kernels": way})
    assert runner.vocab_size == NUM_TOKENS
    assert max(drawn_by(runner)) < NUM_TOKENS
    (padded_folder / "tokenizer.json").unlink()
    wrong = make_runner(padded_folder, **{"model_impl": way} if way == "transformers" else {"cpu_kernels": way})
    assert max(drawn_by(wrong)) >= NUM_TOKENS, "the rows would be drawn if they were let"


def test_another_tokenizer_bounds_what_is_drawn(llama_folder: Path, tmp_path: Path) -> None:
    """`--tokenizer` should count, and workers that draw from other ids exchange no sequence."""
    Tokenizer(MODELS["BPE"]).save(str(tmp_path / "tokenizer.json"))
    own, other = make_runner(llama_folder), make_runner(llama_folder, tokenizer=str(tmp_path))
    assert other.vocab_size == max(WORDS.values()) + 1
    assert drawn_by(other) <= set(range(other.vocab_size))
    assert own.fingerprint != other.fingerprint
