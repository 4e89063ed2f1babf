"""Checkpoints with random weights in Hugging Face layout, for tests and for measuring.

Design note. Nothing here needs `transformers` or a network, and the same shape and seed give the same files. The
tokenizer is a genuine byte-level BPE: every byte is a token, merges join earlier tokens, special tokens come last, and
it fills `tokenizer_size` ids. Greedy text of a random model easily falls into a loop of one or two tokens, which
would hide errors (any two wrong models loop alike). Three things keep it varied: layers add much more to the residual
than the embedding does, so that the output does not echo its input; queries and keys are scaled up, so that attention
picks few positions and the whole context matters; and logits have a standard deviation of about 3, so that the best
two differ clearly even in bf16.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quire.bench.model_shapes import SHAPES, ModelShape

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_MAX_MERGED_BYTES = 16
_LOGIT_STD = 3.0
_QUERY_KEY_GAIN = 2.0


def write_random_model(
    shape: str | ModelShape,
    out: str | Path,
    *,
    seed: int = 0,
    report: Callable[[str], None] | None = None,
) -> Path:
    """The folder `out` with config.json, model.safetensors (bf16), tokenizer and generation config.

    Args:
        shape: a name of `SHAPES`, or sizes of your own.
        out: folder to make; one that already exists is replaced.
        seed: of all weights.
        report: called with a line of progress about once a second when it takes long.

    Raises:
        ValueError: an unknown shape name.
    """
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise ValueError(f"unknown shape {shape!r}; choose from {', '.join(SHAPES)}")
        shape = SHAPES[shape]
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _write_tokenizer(shape, folder)
        _write_configs(shape, folder)
        weights_file = folder / "model.safetensors"
        save_file(_make_weights(shape, seed, report), weights_file, metadata={"format": "pt"})
        weights_file.chmod(0o644)
        folder.chmod(0o755)
        shutil.rmtree(out, ignore_errors=True)
        os.replace(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return out


def _make_weights(shape: ModelShape, seed: int, report: Callable[[str], None] | None) -> dict[str, torch.Tensor]:
    """All tensors by their Hugging Face names, bf16."""
    generator = torch.Generator().manual_seed(seed)
    plan = dict(_tensor_plan(shape))
    total = sum(math.prod(size) for size, _ in plan.values())
    weights: dict[str, torch.Tensor] = {}
    made, last = 0, time.monotonic()
    for name, (size, std) in plan.items():
        tensor = torch.ones(size) if std is None else torch.empty(size).normal_(0.0, std, generator=generator)
        weights[name] = tensor.to(torch.bfloat16)
        made += tensor.numel()
        if report is not None and time.monotonic() - last > 1.0:
            last = time.monotonic()
            report(f"random weights: {made / 1e6:.0f} of {total / 1e6:.0f} million")
    return weights


def _tensor_plan(shape: ModelShape) -> Iterator[tuple[str, tuple[tuple[int, ...], float | None]]]:
    """(name, (size, standard deviation, None for ones)) of every tensor."""
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    q_size, kv_size = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    unit = 1.0 / math.sqrt(hidden)
    logit_std = _LOGIT_STD * unit
    yield "model.embed_tokens.weight", ((shape.vocab_size, hidden), logit_std if shape.is_tied else 0.5)
    for layer in range(shape.num_layers):
        name = f"model.layers.{layer}."
        yield name + "input_layernorm.weight", ((hidden,), None)
        yield name + "self_attn.q_proj.weight", ((q_size, hidden), _QUERY_KEY_GAIN * unit)
        yield name + "self_attn.k_proj.weight", ((kv_size, hidden), _QUERY_KEY_GAIN * unit)
        yield name + "self_attn.v_proj.weight", ((kv_size, hidden), unit)
        if shape.has_qkv_bias:
            for projection, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
                yield f"{name}self_attn.{projection}_proj.bias", ((size,), 0.3)
        yield name + "self_attn.o_proj.weight", ((hidden, q_size), 4.0 / math.sqrt(q_size))
        yield name + "post_attention_layernorm.weight", ((hidden,), None)
        yield name + "mlp.gate_proj.weight", ((ffn, hidden), 1.5 * unit)
        yield name + "mlp.up_proj.weight", ((ffn, hidden), 1.5 * unit)
        yield name + "mlp.down_proj.weight", ((hidden, ffn), 4.0 / math.sqrt(ffn))
    yield "model.norm.weight", ((hidden,), None)
    if not shape.is_tied:
        yield "lm_head.weight", ((shape.vocab_size, hidden), logit_std)


def _write_configs(shape: ModelShape, folder: Path) -> None:
    end_of_text, _, end_of_turn = (shape.tokenizer_size - 3 + i for i in range(3))
    config: dict[str, Any] = {
        "architectures": [shape.architecture],
        "model_type": shape.architecture.removesuffix("ForCausalLM").lower(),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_model_len,
        "tie_word_embeddings": shape.is_tied,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": "bfloat16",
    }
    if shape.architecture == "Qwen2ForCausalLM":
        config |= {"use_sliding_window": shape.window is not None}
        if shape.window is not None:
            config |= {"sliding_window": shape.window, "max_window_layers": shape.num_full_layers}
    elif shape.architecture == "MistralForCausalLM":
        config |= {"sliding_window": shape.window}
    else:
        config |= {"attention_bias": False, "mlp_bias": False}
    generation = {
        "bos_token_id": end_of_text,
        "eos_token_id": [end_of_text, end_of_turn],
        "pad_token_id": end_of_text,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)


def _write_tokenizer(shape: ModelShape, folder: Path) -> None:
    vocabulary, merges = _make_merges(shape.tokenizer_size - len(SPECIAL_TOKENS))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "model_max_length": shape.max_model_len,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", config)


def _make_merges(size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-level vocabulary of `size` tokens and its merges: pairs of letters first, then pairs drawn at random."""
    vocabulary = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    space = "Ġ"
    merges: list[tuple[str, str]] = []
    for left, right in itertools.chain(itertools.product(space, letters), itertools.product(letters, letters)):
        _add_merge(vocabulary, merges, size, left, right)
    draw = random.Random(0)
    parts = [token for token in vocabulary if len(token) > 1]
    words = [token for token in parts if token[0] != space]
    while len(vocabulary) < size:
        left, right = draw.choice(parts), draw.choice(words)
        if len(left + right) <= _MAX_MERGED_BYTES and _add_merge(vocabulary, merges, size, left, right):
            parts.append(left + right)
            if left[0] != space:
                words.append(left + right)
    return vocabulary, merges


def _add_merge(vocabulary: dict[str, int], merges: list[tuple[str, str]], size: int, left: str, right: str) -> bool:
    """Add the token `left + right` unless it exists or the vocabulary is full; whether it was added."""
    if left + right in vocabulary or len(vocabulary) >= size:
        return False
    vocabulary[left + right] = len(vocabulary)
    merges.append((left, right))
    return True


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
