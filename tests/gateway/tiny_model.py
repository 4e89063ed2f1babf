"""A model folder without weights: a byte-level tokenizer with a few merges, control tokens and a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, START, END = "<|begin|>", "<|im_start|>", "<|im_end|>"
MAX_POSITION = 512
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('system role is not supported') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
)
_CORPUS = ["the cat and the other cat were there then", "hello world, this is the text of the test", "one two three"]


def make_tokenizer() -> Tokenizer:
    """All 256 bytes, some merges, and the control tokens last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (BOS, START, END)])
    return tokenizer


def make_model_folder(path: Path, *, template: str | None = CHATML, **config: Any) -> Path:
    """Write the folder at `path`; `config` goes into config.json. The vocabulary of the model is padded by 10 rows."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    end_id = tokenizer.token_to_id(END)
    padded = tokenizer.get_vocab_size(with_added_tokens=True) + 10
    settings = {"vocab_size": padded, "max_position_embeddings": MAX_POSITION, "eos_token_id": end_id, **config}
    (path / "config.json").write_bytes(orjson.dumps(settings))
    tokenizer_config = {"bos_token": BOS, "eos_token": {"content": END}, "chat_template": template}
    (path / "tokenizer_config.json").write_bytes(orjson.dumps(tokenizer_config))
    return path
