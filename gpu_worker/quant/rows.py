"""Weights put below one another, reordered and cut by their outputs, whatever they are stored as."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from kernels.grouped_weight import MIDDLE, GroupedWeight, Weight
from kernels.quantized_linear import QuantizedWeight
from shared.errors import ConfigError

W = TypeVar("W")


def num_rows(weight: Weight) -> int:
    """Its outputs."""
    return len(weight) if isinstance(weight, Tensor) else len(weight.scales)


def join(*weights: Weight) -> Weight:
    """Weights of equal width below one another."""
    return weights[0] if len(weights) == 1 else combine(weights, lambda *parts: torch.cat(parts))


def take_rows(weight: Weight, rows: Tensor | slice) -> Weight:
    """Some outputs, in the order of `rows`."""
    return combine([weight], lambda part: part[rows])


def halves(weight: Weight) -> tuple[Weight, Weight]:
    """The upper and the lower half of the outputs, as views."""
    middle = num_rows(weight) // 2
    return take_rows(weight, slice(None, middle)), take_rows(weight, slice(middle, None))


def combine(weights: Sequence[Weight], change: Callable[..., Tensor]) -> Weight:
    """The weight whose tensors are `change` of those of `weights`; their first dimension is that of outputs.

    Raises:
        ConfigError: they are not stored alike.
    """
    first = weights[0]
    if isinstance(first, Tensor):
        return change(*_alike(weights, Tensor))
    if isinstance(first, QuantizedWeight):
        parts = _alike(weights, QuantizedWeight)
        octets = change(*(part.values.view(torch.uint8) for part in parts))
        return QuantizedWeight(values=octets.view(first.values.dtype), scales=change(*(part.scales for part in parts)))
    grouped = _alike(weights, GroupedWeight)
    if any(not _is_same(part.order, first.order) for part in grouped):
        raise ConfigError("projections that are computed as one must have the same g_idx (order of groups)")
    zeros = None
    if any(part.zeros is not None for part in grouped):
        zeros = change(*(_zeros(part) for part in grouped))
    return replace(
        first,
        nibbles=change(*(part.nibbles for part in grouped)),
        scales=change(*(part.scales for part in grouped)),
        zeros=zeros,
    )


def _alike(weights: Sequence[Weight], kind: type[W]) -> list[W]:
    alike: list[W] = [weight for weight in weights if isinstance(weight, kind)]
    if len(alike) != len(weights):
        raise ConfigError("projections that are computed as one must all be quantized, or none of them")
    return alike


def _zeros(weight: GroupedWeight) -> Tensor:
    return torch.full_like(weight.scales, MIDDLE, dtype=torch.uint8) if weight.zeros is None else weight.zeros


def _is_same(order: Tensor | None, other: Tensor | None) -> bool:
    if order is None or other is None:
        return order is other
    return torch.equal(order, other)
