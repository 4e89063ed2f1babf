"""The tensors of a decoder by their names in a checkpoint, layer by layer: what every way of computing starts from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.model.config import CheckpointConfig, Experts
from gpu_worker.model.loader import Checkpoint, Part
from gpu_worker.model.split import WHOLE, Share, Split
from gpu_worker.quant.linears import IGNORED, read_weight
from gpu_worker.quant.rows import halves, join, num_rows, take_rows
from gpu_worker.quant.scheme import Scheme
from kernels.grouped_weight import Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A linear's weight [out, in] and its bias [out], if it has one."""

    weight: Weight
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    """One feed-forward layer."""

    gate: Projection
    up: Projection
    down: Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder block. `qkv` holds queries, keys and values below one another; `query_norm` and `key_norm`
    [head_size] are there in models that norm heads, `post_attention_norm` and `post_mlp_norm` in those that norm what
    they add. Norms are factors: where a checkpoint holds them less 1, they are float32. `mlp` are the experts behind
    `router`, or one dense layer."""

    input_norm: Tensor
    qkv: Projection
    output: Projection
    mlp_norm: Tensor
    mlp: tuple[MlpWeights, ...]
    router: Projection | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    post_attention_norm: Tensor | None = None
    post_mlp_norm: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterWeights:
    """What is not in a block. `head` is `embedding` itself where they are tied."""

    embedding: Tensor
    norm: Tensor
    head: Weight


def read_outer(config: CheckpointConfig, checkpoint: Checkpoint, split: Split = WHOLE) -> OuterWeights:
    """Embedding, last norm and output projection, of this rank's ids."""
    vocab = (config.vocab_size, config.hidden_size)
    own = Part((split.vocabulary_share(config.vocab_size).own,))
    embedding = checkpoint.take("model.embed_tokens.weight", vocab, None, own)
    return OuterWeights(
        embedding=embedding,
        norm=_take_norm(config, checkpoint, "model.norm", config.hidden_size),
        head=embedding if config.is_tied else _Source(checkpoint, config.scheme).weight("lm_head", vocab, own),
    )


def read_layer(config: CheckpointConfig, checkpoint: Checkpoint, layer: int, split: Split = WHOLE) -> LayerWeights:
    """The weights of block `layer`, this rank's part of each, a head's numbers in the order that `kernels.rotary` turns
    in. `config`: of the whole model."""
    name, hidden, names = f"model.layers.{layer}.", config.hidden_size, _NAMES[config.is_fused]
    source = _Source(checkpoint, config.scheme, name)
    heads, kv = split.share(config.num_heads * config.head_size), split.kv_share(config)
    qkv = _read_joined(source, names.qkv, [heads, kv, kv], hidden, has_bias=config.has_qkv_bias)
    output = _read_addends(source, "self_attn.o_proj", hidden, heads, has_bias=config.has_output_bias)
    experts, router = config.experts[layer] if config.experts else None, None
    if experts is None:
        mlp: tuple[MlpWeights, ...] = (_read_mlp(config, source, split),)
    else:
        mlp, router = _read_experts(experts, source, hidden, split), _read_router(experts, source, hidden)
    return LayerWeights(
        **_read_norms(config, checkpoint, name),
        qkv=_pair_up(qkv, split.own(config), config.ropes[layer].size),
        output=output,
        mlp=mlp,
        router=router,
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a layer's tensors are: `layer` is the prefix of their names."""

    checkpoint: Checkpoint
    scheme: Scheme | None
    layer: str = ""

    def weight(self, name: str, shape: tuple[int, int], part: Part) -> Weight:
        """`part` of the weight of linear `name`, which has `shape`."""
        if self.scheme is None:
            return self.checkpoint.take(f"{self.layer}{name}.weight", shape, None, part)
        assert part.is_whole(shape), "quantized checkpoints are for one rank"
        return read_weight(self.scheme, self.checkpoint, self.layer + name, shape)


def _read_joined(
    source: _Source, names: list[str], shares: list[Share], in_features: int, *, has_bias: bool
) -> Projection:
    """This rank's outputs of several projections below one another, which the checkpoint may hold as one."""
    sizes, parts = [share.whole for share in shares], [Part((share.own,)) for share in shares]
    if len(names) < len(shares):
        firsts = [sum(sizes[:i]) for i in range(len(sizes))]
        rows = [range(n + s.own.start, n + s.own.stop) for n, s in zip(firsts, shares, strict=True)]
        sizes, parts = [sum(sizes)], [Part(tuple(_merge(rows)))]
    wanted = zip(names, sizes, parts, strict=True)
    weight = join(*(source.weight(name, (n, in_features), part) for name, n, part in wanted))
    if not has_bias:
        return Projection(weight=weight)
    biases = [f"{source.layer}{name}.bias" for name in names]
    return Projection(weight=weight, bias=source.checkpoint.take_joined(biases, [(n,) for n in sizes], parts))


def _merge(rows: list[range]) -> list[range]:
    """`rows`, those that follow one another as one."""
    merged = rows[:1]
    for piece in rows[1:]:
        if piece.start == merged[-1].stop:
            merged[-1] = range(merged[-1].start, piece.stop)
        else:
            merged.append(piece)
    return merged


def _read_addends(source: _Source, name: str, out_features: int, inner: Share, *, has_bias: bool = False) -> Projection:
    """A projection of this rank's inputs. Its bias, which is added to the sum of all ranks' results, is whole."""
    part = Part((range(out_features),), inner.own)
    return Projection(
        weight=source.weight(name, (out_features, inner.whole), part),
        bias=source.checkpoint.take(f"{source.layer}{name}.bias", (out_features,)) if has_bias else None,
    )


def _read_mlp(config: CheckpointConfig, source: _Source, split: Split) -> MlpWeights:
    hidden, inner, has_bias = config.hidden_size, split.share(config.intermediate_size), config.has_mlp_bias
    names = _NAMES[config.is_fused].gate_up
    gate, up = _split(_read_joined(source, names, [inner, inner], hidden, has_bias=has_bias))
    down = _read_addends(source, "mlp.down_proj", hidden, inner, has_bias=has_bias)
    return MlpWeights(gate=gate, up=up, down=down)


def _read_experts(experts: Experts, source: _Source, hidden: int, split: Split) -> tuple[MlpWeights, ...]:
    names, inner = experts.names, split.share(experts.size)

    def take(name: str, expert: int) -> Projection:
        return _read_joined(source, [name.format(expert)], [inner], hidden, has_bias=False)

    return tuple(
        MlpWeights(
            gate=take(names.gate, i),
            up=take(names.up, i),
            down=_read_addends(source, names.down.format(i), hidden, inner),
        )
        for i in range(experts.count)
    )


def _read_router(experts: Experts, source: _Source, hidden: int) -> Projection:
    name = f"{source.layer}{experts.names.router}.weight"
    return Projection(weight=source.checkpoint.take(name, (experts.count, hidden)))


def _read_norms(config: CheckpointConfig, checkpoint: Checkpoint, layer: str) -> dict[str, Tensor]:
    """The norms of a layer by their names in `LayerWeights`. `layer`: prefix of its tensors."""
    names = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if config.has_post_norms:
        names["mlp_norm"] = "pre_feedforward_layernorm"
        names |= {"post_attention_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"}
    norms = {part: _take_norm(config, checkpoint, layer + name, config.hidden_size) for part, name in names.items()}
    if config.has_qk_norm:
        for part, name in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            norms[part] = _take_norm(config, checkpoint, f"{layer}self_attn.{name}", config.head_size)
    return norms


def _take_norm(config: CheckpointConfig, checkpoint: Checkpoint, name: str, size: int) -> Tensor:
    if not config.has_offset_norms:
        return checkpoint.take(name + ".weight", (size,))
    return 1.0 + checkpoint.take(name + ".weight", (size,), torch.float32)


@dataclass(frozen=True, slots=True)
class _Names:
    """What a checkpoint calls the projections that are computed as one."""

    qkv: list[str]
    gate_up: list[str]


_NAMES = {
    False: _Names(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.gate_proj", "mlp.up_proj"]),
    True: _Names(["self_attn.qkv_proj"], ["mlp.gate_up_proj"]),
}
"""By whether the checkpoint holds them as one, too."""


def _split(projection: Projection) -> tuple[Projection, Projection]:
    """The upper and the lower half of the outputs, as views."""
    weights = halves(projection.weight)
    biases = (None, None) if projection.bias is None else projection.bias.chunk(2)
    first, second = (Projection(weight=weight, bias=bias) for weight, bias in zip(weights, biases, strict=True))
    return first, second


def _pair_up(qkv: Projection, config: CheckpointConfig, num_turned: int) -> Projection:
    """`qkv` with the numbers of each query and key head in their `head_order`."""
    size = config.head_size
    order = head_order(size, num_turned)
    if order is None:
        return qkv
    num_turned_rows = (config.num_heads + config.num_kv_heads) * size
    rows = (torch.arange(0, num_turned_rows, size)[:, None] + order).flatten()
    rows = torch.cat((rows, torch.arange(num_turned_rows, num_rows(qkv.weight))))
    return Projection(weight=take_rows(qkv.weight, rows), bias=None if qkv.bias is None else qkv.bias[rows])


def head_order(size: int, num_turned: int) -> Tensor | None:
    """The order of a query or key head's numbers where only the first `num_turned` of `size` are turned; None: theirs.

    `kernels.rotary` turns number i of a head with number i + size / 2. So the turned halves come first in either half
    of the head, and the others fill it up. Queries and keys change places alike, so their products stay the same.
    """
    if num_turned == size:
        return None
    numbers = torch.arange(size)
    turned, still = numbers[:num_turned].chunk(2), numbers[num_turned:].chunk(2)
    return torch.cat((turned[0], still[0], turned[1], still[1]))


def ignored_weights(config: CheckpointConfig) -> tuple[str, ...]:
    """Endings of names that a checkpoint may hold for nothing."""
    endings = ("rotary_emb.inv_freq", *(IGNORED if config.scheme else ()))
    return (*endings, "lm_head.weight") if config.is_tied else endings
