"""AWQ: scales of a layer's channels, chosen by what its linears are given, so that rounding spares what counts.

A channel that is given large numbers has its weights multiplied by s > 1 before they are rounded, and is given numbers
divided by s: the same product, with finer steps where they count most. The division costs nothing at run time: it goes
into what makes the channel, a norm or the linear before. Then each group's range is cut where that lowers the error.

Design note: what makes channels and what reads them are, in a block: input norm → q, k, v; v → o (with equal scales
for query heads that share a key head); norm → gate, up; up → down. A candidate for s is mean|x|^r / mean|w|^(1 − r),
for r in 20 steps from 0, or 1; its error is that of `_OUTPUTS` of the linears' outputs, over `_ROWS` of the
calibration's rows. In memory: one layer in float32.

Source: Lin et al., AWQ (arXiv:2306.00978); AutoAWQ for the form of candidates, and that q and k are not cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.quant.calibration import LinearInputs
from gpu_worker.quant.rounding import Rounded, round_to_groups

_ROWS = 512
_RATIOS = 20
_OUTPUTS = 256
_SHRINKS = (1.0, 0.9, 0.8, 0.7, 0.6)
"""Of a group's range."""
_SMALLEST = 1e-4

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatLayer:
    """A block's weights, float32, which `search_layer` folds scales into, in place.

    Attributes:
        linears: "q", "k", "v", "o", "gate", "up", "down" [out, in]. biases: of those that have one.
        kv_heads, head_size: of the keys.
        norm_dtype: what norms are stored in.
    """

    linears: dict[str, Tensor]
    biases: dict[str, Tensor]
    input_norm: Tensor
    mlp_norm: Tensor
    kv_heads: int
    head_size: int
    norm_dtype: torch.dtype


def search_layer(layer: FloatLayer, inputs: LinearInputs, group: int) -> dict[str, Rounded]:
    """The linears of `layer` rounded in groups of `group`; its norms and biases fit them afterwards.

    Args:
        inputs: what the linears of the layer are given as it is.
    """
    sample = {part: _sample(getattr(inputs, part), _ROWS) for part in ("qkv", "output", "gate_up", "down")}
    for part, norm, readers in (
        ("qkv", layer.input_norm, ("q", "k", "v")),
        ("gate_up", layer.mlp_norm, ("gate", "up")),
    ):
        scales = _search([layer.linears[name] for name in readers], sample[part], group, lambda scales: scales)
        _scale_readers(layer, readers, sample[part], _divide_norm(norm, scales, layer.norm_dtype))
    shared = _search([layer.linears["o"]], sample["output"], group, lambda scales: _spread(scales, layer))
    _divide_outputs(layer, "v", _of_kv_heads(shared, layer))
    _scale_readers(layer, ("o",), sample["output"], shared)
    scales = _search([layer.linears["down"]], sample["down"], group, lambda scales: scales)
    _divide_outputs(layer, "up", scales)
    _scale_readers(layer, ("down",), sample["down"], scales)
    return {name: _round(name, weight, sample[_READS[name]], group) for name, weight in layer.linears.items()}


_READS = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "output", "gate": "gate_up", "up": "gate_up", "down": "down"}


def _sample(x: Tensor, count: int) -> Tensor:
    """Some rows of `x`, at most `count`, evenly spread, as a copy."""
    return x[:: -(-len(x) // count)].clone()


def _search(weights: list[Tensor], x: Tensor, group: int, change: Change) -> Tensor:
    """The best scales [in] of what `weights` read; `change` makes candidates possible ones."""
    weight = _sample(torch.cat(weights), _OUTPUTS)
    size = x.abs().mean(0)
    groups = weight.abs().view(len(weight), -1, group)
    share = (groups / (groups.amax(-1, keepdim=True) + _SMALLEST)).flatten(1).mean(0)
    candidates = [torch.ones_like(size)]
    for i in range(_RATIOS):
        ratio = i / _RATIOS
        scales = change((size.pow(ratio) / (share.pow(1 - ratio) + _SMALLEST)).clamp(min=_SMALLEST))
        candidates.append(scales / (scales.max() * scales.min()).sqrt())
    errors = [_error(weight, scales, x, group) for scales in candidates]
    return candidates[errors.index(min(errors))]


def _error(weight: Tensor, scales: Tensor, x: Tensor, group: int) -> float:
    off = round_to_groups(weight * scales, group).floats() / scales - weight
    return float((x @ off.T).square().mean())


def _divide_norm(norm: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide `norm` by `scales` and round it to `dtype`; the scales that it then has really been divided by."""
    divided = (norm / scales).to(dtype).float()
    real = torch.where((divided == 0) | (norm == 0), scales, norm / divided)
    norm.copy_(divided)
    return real


def _divide_outputs(layer: FloatLayer, name: str, scales: Tensor) -> None:
    layer.linears[name] /= scales[:, None]
    if name in layer.biases:
        layer.biases[name] /= scales


def _scale_readers(layer: FloatLayer, names: tuple[str, ...], x: Tensor, scales: Tensor) -> None:
    for name in names:
        layer.linears[name] *= scales
    x /= scales


def _of_kv_heads(scales: Tensor, layer: FloatLayer) -> Tensor:
    """Means over the query heads of each key head: [query heads · size] → [key heads · size]."""
    return scales.view(layer.kv_heads, -1, layer.head_size).mean(1).flatten()


def _spread(scales: Tensor, layer: FloatLayer) -> Tensor:
    """Each key head's mean for all of its query heads."""
    by_head = scales.view(layer.kv_heads, -1, layer.head_size)
    return by_head.mean(1, keepdim=True).expand_as(by_head).flatten()


def _round(name: str, weight: Tensor, x: Tensor, group: int) -> Rounded:
    """`weight` rounded, the range of each group cut where its outputs then are nearer."""
    if name in ("q", "k"):
        return round_to_groups(weight, group)
    by_group = x.view(len(x), -1, group).transpose(0, 1)
    products = by_group.transpose(1, 2) @ by_group  # [groups, size, size]
    shape = (len(weight), weight.shape[1] // group, 1)
    best, least = torch.ones(shape), torch.full(shape, torch.inf)
    for shrink in _SHRINKS:
        off = (round_to_groups(weight, group, shrink).floats() - weight).view(len(weight), -1, group).transpose(0, 1)
        error = ((off @ products) * off).sum(-1, keepdim=True).transpose(0, 1)
        best = torch.where(error < least, torch.full_like(best, shrink), best)
        least = torch.minimum(least, error)
    return round_to_groups(weight, group, best)
