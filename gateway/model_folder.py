"""What the gateway takes from a model's files: tokenizer, end tokens, defaults, chat template, context length.

`tokenizer.json` and `config.json` must be there; `tokenizer_config.json`, `generation_config.json` and
`chat_template.jinja` may be. They lie in a folder, or in the card that a worker has published.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import orjson
from tokenizers import Tokenizer

from gateway.generation_defaults import read_defaults
from shared.context_length import longest_text
from shared.errors import ConfigError
from shared.model_card import ModelCard, read_card
from shared.model_files import GENERATION_FILE, ModelFiles

_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """The text side of one model.

    Args:
        name: the folder's name.
        tokenizer: parses special tokens that are spelled out in text.
        inert_tokenizer: the same, but takes such spellings as plain text.
        decoder_spec: the `decoder` of tokenizer.json, None if it has none.
        vocab_size: rows of the model's embedding; prompt ids are below it.
        max_token_id: highest id that the tokenizer knows.
        max_token_bytes: length of its longest token.
        eos_ids: tokens that end an answer.
        chat_template: Jinja source, None if the model has none.
        template_tokens: `bos_token` and the like, for the template.
        defaults: of sampling, by fields of a request, from generation_config.json.
        max_position: tokens that the model was made for. longest_text: those that it may be asked for.
    """

    name: str
    tokenizer: Tokenizer
    inert_tokenizer: Tokenizer
    decoder_spec: dict[str, Any] | None
    vocab_size: int
    max_token_id: int
    max_token_bytes: int
    eos_ids: tuple[int, ...]
    chat_template: str | None
    template_tokens: dict[str, str]
    defaults: dict[str, Any]
    max_position: int
    longest_text: int


def load_model_folder(path: Path) -> ModelFolder:
    """Read the folder at `path`.

    Raises:
        ConfigError: it is not a model folder, or a file in it cannot be read.
    """
    return read_model(read_card(ModelFiles(model=path)))


def read_model(card: ModelCard) -> ModelFolder:
    """The text side of the model of `card`. Raises `ConfigError`: a file in it cannot be read."""
    tokenizer = _load_tokenizer(card)
    config = _read_json(card, "config.json")
    text_config = config.get("text_config") or config
    tokenizer_config = _read_json(card, "tokenizer_config.json")
    generation = _read_json(card, GENERATION_FILE)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    max_token_id = max(vocab.values())
    max_position = int(text_config.get("max_position_embeddings") or text_config.get("n_positions") or 2048)
    template_tokens = _template_tokens(tokenizer_config)
    return ModelFolder(
        name=card.name,
        tokenizer=tokenizer,
        inert_tokenizer=_make_inert(tokenizer),
        decoder_spec=_read_decoder(card),
        vocab_size=int(text_config.get("vocab_size") or max_token_id + 1),
        max_token_id=max_token_id,
        max_token_bytes=max(len(token.encode()) for token in vocab),
        eos_ids=_eos_ids(generation, text_config, tokenizer, template_tokens),
        chat_template=_chat_template(card, tokenizer_config),
        template_tokens=template_tokens,
        defaults=read_defaults(generation, card.place(GENERATION_FILE)) if card.has_defaults else {},
        max_position=max_position,
        longest_text=longest_text(text_config, max_position),
    )


def _load_tokenizer(card: ModelCard) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(card.files["tokenizer.json"])
    except Exception as error:  # the only class that tokenizers raises
        text = f"{card.place('tokenizer.json')} is not a tokenizer of the tokenizers library: {error}"
        raise ConfigError(text) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _make_inert(tokenizer: Tokenizer) -> Tokenizer:
    """The same, but control tokens are plain text to it. Both share the model: vocabulary and merges, which are all but
    some kilobytes of a tokenizer."""
    inert = Tokenizer(tokenizer.model)
    inert.normalizer, inert.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    inert.post_processor, inert.decoder = tokenizer.post_processor, tokenizer.decoder
    added = tokenizer.get_added_tokens_decoder()
    inert.add_tokens([added[token_id] for token_id in sorted(added)])
    assert inert.get_added_tokens_decoder() == added
    inert.encode_special_tokens = True
    return inert


class _TokenizerFile(msgspec.Struct):
    decoder: dict[str, Any] | None = None


def _read_decoder(card: ModelCard) -> dict[str, Any] | None:
    """The rest of the file, megabytes of it, is passed over."""
    return msgspec.json.decode(card.files["tokenizer.json"], type=_TokenizerFile).decoder


def _read_json(card: ModelCard, name: str) -> dict[str, Any]:
    """The object in file `name`; empty when there is no such file."""
    try:
        value = orjson.loads(card.files.get(name, b"{}"))
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{card.place(name)} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{card.place(name)}: must hold a JSON object")
    return value


def _eos_ids(
    generation: dict[str, Any], config: dict[str, Any], tokenizer: Tokenizer, template_tokens: dict[str, str]
) -> tuple[int, ...]:
    """End tokens of generation_config.json (config.json if it names none), and the tokenizer's own."""
    named = generation.get("eos_token_id")
    if named is None:
        named = config.get("eos_token_id")
    ids = [named] if isinstance(named, int) else list(named or ())
    own = tokenizer.token_to_id(template_tokens["eos_token"]) if "eos_token" in template_tokens else None
    return tuple(sorted({*ids, *([] if own is None else [own])}))


def _chat_template(card: ModelCard, tokenizer_config: dict[str, Any]) -> str | None:
    if (source := card.files.get("chat_template.jinja")) is not None:
        try:
            return source.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{card.place('chat_template.jinja')} is not UTF-8: {error}") from None
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = {item["name"]: item["template"] for item in template}.get("default")
    return template if isinstance(template, str) else None


def _template_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Special tokens are written as a string, or as a map with `content`."""
    tokens: dict[str, str] = {}
    for name in _TEMPLATE_TOKENS:
        value = tokenizer_config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens
