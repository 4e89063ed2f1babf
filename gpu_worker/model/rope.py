"""How far positions turn queries and keys: the rotary frequencies that a checkpoint's config asks for.

The kinds and their formulas are those of transformers' `modeling_rope_utils`; names of settings are config.json's. Two
kinds depend on how long a text gets: dynamic and longrope. There a server that changed its mind in the middle of a
text, as transformers does, would hold keys of two kinds in one cache, so the choice is made once, by the longest text
that the worker takes (`--max-model-len`), and is part of the worker's fingerprint.

Where only a part of a head is turned (`partial_rotary_factor`), the other numbers of a head get frequency 0; weights
are put into the order that the kernels turn in when they are read (`weights.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu_worker.model.config_reader import ConfigReader
from kernels.rotary import make_cos_sin
from shared.context_length import stretched_len
from shared.errors import ConfigError, shorten

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding of a layer.

    Attributes:
        kind: one of `KINDS`. theta: the base of the frequencies.
        size: numbers of a head that are turned, an even number; the first ones of it.
        factor: by how much the context is stretched.
        original_len: tokens of the context that was trained before stretching.
        attention_factor: factor of cos and sin.
        low_freq_factor, high_freq_factor: of llama3: waves per original context where stretching is full, and none.
        beta_fast, beta_slow, is_truncated: of yarn: turns per original context where stretching is none, and full, and
            whether the numbers between are whole ones.
        short_factors, long_factors: of longrope, one for each frequency.
    """

    kind: str = "default"
    theta: float
    size: int
    factor: float = 1.0
    original_len: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def longest_len(self) -> int:
        """Tokens that this kind of stretching reaches, where it says; 0: no more than `max_position_embeddings`."""
        return stretched_len(self.kind, self.factor, self.original_len)

    def choice(self, model_len: int) -> str:
        """What depends on the longest text of `model_len` tokens, as a word; empty: nothing does."""
        if self.kind == "longrope":
            return "long" if model_len > self.original_len else "short"
        return f"dynamic {model_len}" if self.kind == "dynamic" and model_len > self.original_len else ""


def read_rope(reader: ConfigReader, nested: ConfigReader, *, head_size: int, max_position: int) -> Rope:
    """The rope of `nested` (`rope_parameters` or `rope_scaling`) with what only `reader`, all of config.json, says.

    Raises:
        ConfigError: an unknown kind or a bad value.
    """
    kind = nested.get("rope_type") or nested.get("type") or "default"
    if kind not in KINDS:
        raise ConfigError(
            f"{reader.path}: rope scaling {shorten(repr(kind))} is not supported; supported: {', '.join(KINDS)}"
        )
    theta = nested.number("rope_theta", reader.number("rope_theta", 10000.0))
    share = nested.number("partial_rotary_factor", reader.number("partial_rotary_factor", 1.0))
    rope = Rope(kind=kind, theta=theta, size=int(head_size * share))
    if rope.size > head_size or rope.size % 2 or (head_size - rope.size) % 2 or not rope.size:
        owner = nested if "partial_rotary_factor" in nested.raw else reader
        owner.fail("partial_rotary_factor", f"must turn an even number of a head's {head_size} numbers")
    return _read_stretching(reader, nested, rope, max_position)


def _read_stretching(reader: ConfigReader, nested: ConfigReader, plain: Rope, max_position: int) -> Rope:
    original = reader.size("original_max_position_embeddings", 0) or nested.size(
        "original_max_position_embeddings", max_position
    )
    if plain.kind == "linear":
        return replace(plain, factor=nested.number("factor", 1.0))
    if plain.kind == "dynamic":
        return replace(plain, factor=nested.number("factor", 1.0), original_len=max_position)
    if plain.kind == "llama3":
        low, high = nested.number("low_freq_factor", 1.0), nested.number("high_freq_factor", 4.0)
        if high <= low:
            nested.fail("high_freq_factor", f"must be more than low_freq_factor = {low}")
        factor = nested.number("factor", 8.0)
        return replace(plain, factor=factor, original_len=original, low_freq_factor=low, high_freq_factor=high)
    stretched = replace(
        plain, factor=nested.optional_number("factor") or max_position / original, original_len=original
    )
    if plain.kind == "yarn":
        return replace(
            stretched,
            attention_factor=_yarn_attention_factor(nested, stretched.factor),
            beta_fast=nested.optional_number("beta_fast") or 32.0,
            beta_slow=nested.optional_number("beta_slow") or 1.0,
            is_truncated=nested.flag("truncate", True),
        )
    if plain.kind == "longrope":
        grown = math.log(max(stretched.factor, 1.0)) / math.log(original)
        return replace(
            stretched,
            attention_factor=nested.optional_number("attention_factor") or math.sqrt(1 + grown),
            short_factors=nested.numbers("short_factor", plain.size // 2),
            long_factors=nested.numbers("long_factor", plain.size // 2),
        )
    return plain


def _yarn_attention_factor(nested: ConfigReader, factor: float) -> float:
    given = nested.optional_number("attention_factor")
    if given is not None:
        return given
    mscale, mscale_all_dim = (nested.optional_number(key) for key in ("mscale", "mscale_all_dim"))
    if mscale and mscale_all_dim:
        return _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all_dim)
    return _yarn_scale(factor)


def _yarn_scale(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotary_table(rope: Rope, head_size: int, num_positions: int, device: torch.device) -> Tensor:
    """cos and sin of all positions below `num_positions`, the longest text: [num_positions, head_size] float32."""
    frequencies = inverse_frequencies(rope, num_positions)
    turned = make_cos_sin(frequencies, num_positions) * rope.attention_factor
    still = make_cos_sin(torch.zeros((head_size - rope.size) // 2), num_positions)
    halves = (part.chunk(2, dim=-1) for part in (turned, still))
    (cos, sin), (one, zero) = halves
    return torch.cat((cos, one, sin, zero), dim=-1).to(device)


def inverse_frequencies(rope: Rope, model_len: int) -> Tensor:
    """How far each pair of numbers turns from one position to the next, [size / 2] float32 radians.

    Args:
        model_len: the longest text, tokens.
    """
    theta, exponents = rope.theta, torch.arange(0, rope.size, 2, dtype=torch.int64).float() / rope.size
    if rope.kind == "dynamic":
        longest = max(model_len, rope.original_len)
        grown = rope.factor * longest / rope.original_len - (rope.factor - 1)
        theta *= grown ** (rope.size / (rope.size - 2))
    waves: Tensor = theta**exponents
    if rope.kind == "longrope":
        factors = rope.long_factors if rope.choice(model_len) == "long" else rope.short_factors
        return 1.0 / (torch.tensor(factors) * waves)
    frequencies: Tensor = 1.0 / waves
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return _yarn(frequencies, rope) if rope.kind == "yarn" else frequencies


def _llama3(frequencies: Tensor, rope: Rope) -> Tensor:
    """Long waves are divided by the factor, short ones kept, those between are mixed linearly (Llama 3.1)."""
    waves_in_original = rope.original_len * frequencies / (2 * math.pi)
    share = (waves_in_original - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = share.clamp(0.0, 1.0)
    return (1 - share) * frequencies / rope.factor + share * frequencies


def _yarn(frequencies: Tensor, rope: Rope) -> Tensor:
    """Pairs that turn often within the original context are kept, those that turn seldom divided by the factor, those
    between are mixed linearly by their index (arXiv 2309.00071)."""

    def index_of(num_turns: float) -> float:
        wavelength = rope.original_len / (num_turns * 2 * math.pi)
        return rope.size * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.size - 1)
    indices = torch.arange(rope.size // 2, dtype=torch.float32)
    stretched = ((indices - low) / ((high - low) or 0.001)).clamp(0, 1)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)
