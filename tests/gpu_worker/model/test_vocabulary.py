"""The number of token ids, read from tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models

from gpu_worker.model.vocabulary import tokenizer_size
from shared.errors import ConfigError

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
    assert tokenizer_size(tmp_path) == max(tokenizer.get_vocab().values()) + 1


def test_no_tokenizer_has_no_size(tmp_path: Path) -> None:
    """A folder without a tokenizer should have none."""
    assert tokenizer_size(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{}", "[]", json.dumps({"model": {"vocab": {"a": "b"}}})])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    """What cannot be read should be refused with the file's name."""
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer"):
        tokenizer_size(tmp_path)
