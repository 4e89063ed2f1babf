"""What the gateway takes from a model folder: tokenizer, end tokens, chat template, context length, sampling.

Files: `tokenizer.json` and `config.json` must be there; `tokenizer_config.json`, `generation_config.json` and
`chat_template.jinja` may be.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import orjson
from tokenizers import Tokenizer

from gateway.generation_defaults import GenerationDefaults, read_defaults
from shared.context_length import longest_text
from shared.errors import ConfigError
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
        max_position: tokens that the model was made for. longest_text: those that it may be asked for.
        defaults: sampling where a request says nothing.
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
    max_position: int
    longest_text: int
    defaults: GenerationDefaults


def load_model_folder(path: Path) -> ModelFolder:
    """Read the folder at `path`. Raises `ConfigError` as `load_model_files` does."""
    return load_model_files(ModelFiles(model=path))


def load_model_files(files: ModelFiles) -> ModelFolder:
    """Read the files of a model.

    Raises:
        ConfigError: it is not a model folder, or a file in it cannot be read.
    """
    files.check()
    tokenizer = _load_tokenizer(files.path("tokenizer.json"))
    config = _read_json(files.path("config.json"), required=True)
    text_config = config.get("text_config") or config
    tokenizer_config = _read_json(files.path("tokenizer_config.json"))
    generation = _read_json(files.path(GENERATION_FILE))
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    max_token_id = max(vocab.values())
    max_position = int(text_config.get("max_position_embeddings") or text_config.get("n_positions") or 2048)
    template_tokens = _template_tokens(tokenizer_config)
    return ModelFolder(
        name=files.model.resolve().name,
        tokenizer=tokenizer,
        inert_tokenizer=_make_inert(tokenizer),
        decoder_spec=_read_decoder(files.path("tokenizer.json")),
        vocab_size=int(text_config.get("vocab_size") or max_token_id + 1),
        max_token_id=max_token_id,
        max_token_bytes=max(len(token.encode()) for token in vocab),
        eos_ids=_eos_ids(generation, text_config, tokenizer, template_tokens),
        chat_template=_chat_template(files.path("chat_template.jinja"), tokenizer_config),
        template_tokens=template_tokens,
        max_position=max_position,
        longest_text=longest_text(text_config, max_position),
        defaults=read_defaults(generation if files.has_defaults else {}, str(files.path(GENERATION_FILE))),
    )


def _load_tokenizer(file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the only class that tokenizers raises
        raise ConfigError(f"{file} is not a tokenizer of the tokenizers library: {error}") from None
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


def _read_decoder(file: Path) -> dict[str, Any] | None:
    """The rest of the file, megabytes of it, is passed over."""
    return msgspec.json.decode(file.read_bytes(), type=_TokenizerFile).decoder


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not required and not path.is_file():
        return {}
    try:
        value = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
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


def _chat_template(file: Path, tokenizer_config: dict[str, Any]) -> str | None:
    if file.is_file():
        return file.read_text(encoding="utf-8")
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
