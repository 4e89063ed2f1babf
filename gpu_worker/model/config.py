"""What a checkpoint's config.json says, read strictly: what we would not honour is refused by name.

A `CheckpointConfig` is sizes and switches. `read_decoder` reads what all families have in common; the file of a family
adds what is its own, and `families.py` knows them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_worker.model.config_reader import ConfigReader
from gpu_worker.model.rope import Rope, read_rope
from gpu_worker.quant.scheme import Scheme, read_scheme
from shared.errors import shorten

FULL, SLIDING = "full_attention", "sliding_attention"
"""What `layer_types` calls layers that see all, and those that see a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What a checkpoint calls the weights of a layer's experts; {} stands for an expert's number."""

    router: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a layer: `count` feed-forward layers of `size` inner numbers, of which `num_used` compute a token.
    `is_normalized`: the shares of those used add up to 1."""

    count: int
    num_used: int
    size: int
    is_normalized: bool
    names: ExpertNames


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Sizes and switches of a decoder.

    Attributes:
        max_position: tokens of the longest text.
        dtype: the checkpoint's own, a torch name ("bfloat16").
        windows: of each layer: the query at position p sees the keys p − window + 1 .. p; None: all up to p.
        ropes: of each layer.
        query_scale: factor of attention's scores. attention_softcap, logit_softcap: caps of `kernels.softcap`.
        embedding_scale: factor of embeddings, rounded to the model's dtype.
        gate: of the feed-forward layer: "silu" or "gelu_tanh".
        has_offset_norms: norms multiply by 1 + w, in float32.
        has_post_norms: what attention and the feed-forward layer give is normed before it is added.
        experts: of each layer, None: it is dense. Empty: all are.
        has_qk_norm: each head of queries and of keys is normed before it is turned.
        is_fused: queries, keys and values are one tensor of the checkpoint, gate and up another.
        scheme: how linears are quantized; None: they are floats.
        is_foreign: the code of `transformers` computes it, which knows what is not said here.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position: int
    rms_norm_eps: float
    query_scale: float
    is_tied: bool
    dtype: str
    windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...]
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_offset_norms: bool = False
    has_post_norms: bool = False
    gate: str = "silu"
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    experts: tuple[Experts | None, ...] = ()
    is_fused: bool = False
    scheme: Scheme | None = None
    is_foreign: bool = False

    @property
    def distinct_ropes(self) -> tuple[Rope, ...]:
        """The ropes that there are, each once."""
        return tuple(dict.fromkeys(self.ropes))

    @property
    def rope_ids(self) -> tuple[int, ...]:
        """Of each layer: which of `distinct_ropes`."""
        return tuple(map(self.distinct_ropes.index, self.ropes))

    @property
    def longest_len(self) -> int:
        """Tokens that `--max-model-len` may ask for: stretched ropes reach further than `max_position`."""
        return max([self.max_position, *(rope.longest_len for rope in self.ropes)])


def read_decoder(
    reader: ConfigReader, *, activation: tuple[str, str] = ("hidden_act", "silu"), is_turned_whole: bool = True
) -> CheckpointConfig:
    """What `reader` says of any family: no window, one rope, no biases.

    Args:
        activation: the key that names the gate's activation, and the only one that is supported.
        is_turned_whole: transformers has no `partial_rotary_factor` for the family.

    Raises:
        ConfigError: a bad or missing value, or something this version does not support.
    """
    act_key, act = activation
    if reader.get(act_key) not in (None, act):
        reader.fail(act_key, f"only {act} is supported")
    hidden_size, num_heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    num_layers, max_position = reader.size("num_hidden_layers"), reader.size("max_position_embeddings")
    num_kv_heads = reader.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        reader.fail("num_key_value_heads", f"must divide num_attention_heads = {num_heads}")
    head_size = reader.size("head_dim", hidden_size // num_heads)
    nested = reader.nested("rope_parameters", "rope_scaling")
    rope = read_rope(reader, nested, head_size=head_size, max_position=max_position)
    if is_turned_whole and rope.size != head_size:
        owner = nested if "partial_rotary_factor" in nested.raw else reader
        owner.fail("partial_rotary_factor", "only 1 is supported for this architecture")
    return CheckpointConfig(
        architecture=str(reader.get("architectures")[0]),
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_position=max_position,
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        query_scale=head_size**-0.5,
        is_tied=reader.flag("tie_word_embeddings", False),
        dtype=str(reader.get("dtype") or reader.get("torch_dtype") or "float32").removeprefix("torch."),
        windows=(None,) * num_layers,
        ropes=(rope,) * num_layers,
        scheme=read_scheme(reader),
    )


def read_experts(reader: ConfigReader, count_key: str, *, size: int, names: ExpertNames) -> Experts:
    """Experts of `size` inner numbers, as many as `count_key` says."""
    count, num_used = reader.size(count_key), reader.size("num_experts_per_tok")
    if num_used > count:
        reader.fail("num_experts_per_tok", f"there are {count} experts")
    is_normalized = reader.flag("norm_topk_prob", True)
    return Experts(count=count, num_used=num_used, size=size, is_normalized=is_normalized, names=names)


def refuse_windows(reader: ConfigReader, config: CheckpointConfig) -> None:
    """Refuse windows, which the family has not."""
    if reader.flag("use_sliding_window", reader.get("sliding_window") is not None):
        key = "use_sliding_window" if "use_sliding_window" in reader.raw else "sliding_window"
        reader.fail(key, f"{config.architecture} has no sliding window")
    layer_kinds(reader, [FULL] * config.num_layers, may_differ=False)


def read_window(reader: ConfigReader) -> int | None:
    """`sliding_window`; None: it is null or not there."""
    return None if reader.get("sliding_window") is None else reader.size("sliding_window")


def same_windows(reader: ConfigReader, window: int | None, num_layers: int) -> tuple[int | None, ...]:
    """`window` in every layer."""
    layer_kinds(reader, [FULL if window is None else SLIDING] * num_layers, may_differ=False)
    return (window,) * num_layers


def layer_kinds(reader: ConfigReader, kinds: Sequence[str], *, may_differ: bool) -> list[str]:
    """What `layer_types` says, or `kinds` if it says nothing. It may name other kinds than `kinds` only where
    transformers would follow it."""
    named = reader.get("layer_types")
    if named is None:
        return list(kinds)
    if not isinstance(named, list) or not all(isinstance(kind, str) for kind in named) or len(named) != len(kinds):
        reader.fail("layer_types", f"must name a kind for each of {len(kinds)} layers")
    other = set(named) - {FULL, SLIDING}
    if other:
        reader.fail("layer_types", f"{shorten(', '.join(sorted(other)))} is not supported in this version")
    if named != list(kinds) and not may_differ:
        reader.fail("layer_types", f"is not supported beside the other settings, by which all layers are {kinds[0]}")
    return list(named)


def mixed_windows(window: int | None, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """`window` in the layers that `kinds` calls sliding."""
    return tuple(window if kind == SLIDING else None for kind in kinds)
