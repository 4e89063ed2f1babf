"""How many token ids a model folder's tokenizer knows, read from tokenizer.json without making a tokenizer of it.

A tokenizer of 152,000 tokens takes 100 MB and most of a second; a worker needs one number of it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from shared.errors import ConfigError


class _Model(msgspec.Struct):
    """`vocab`: ids by token, or (Unigram) tokens in the order of their ids."""

    vocab: dict[str, int] | list[msgspec.Raw]


class _AddedToken(msgspec.Struct):
    id: int


class _TokenizerFile(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []


_decode = msgspec.json.Decoder(_TokenizerFile).decode


def tokenizer_size(path: Path) -> int | None:
    """Ids up to the largest that has a token in the tokenizer.json at `path`; None if there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    if not path.is_file():
        return None
    try:
        file = _decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is not a tokenizer of the tokenizers library: {error}") from None
    vocab = file.model.vocab
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    return max([*ids, *(token.id for token in file.added_tokens)], default=-1) + 1
