"""Adds to a program a feed-forward layer's experts: who computes which row, and the products (experts.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.linear import PackedWeight, linear_args
from kernels.cpu.ops import (
    CombineArgs,
    Epilogue,
    ExpertsArgs,
    GatherPairsArgs,
    OpKind,
    RouteArgs,
    Weight,
)
from kernels.cpu.program import Program, address


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPairs:
    """Who computes which row of a step: a pair is a row and one of its `num_used` experts.

    Attributes:
        chosen, shares, place_of: [rows, num_used] int32, float32, int32: each row's experts, rising, their shares, and
            where the pairs are when sorted by expert.
        row_of: [rows · num_used] int32: the rows of the sorted pairs.
        starts: [experts + 1] int32: each expert's first sorted pair. active: [1 + experts] int32: how many experts have
            pairs, and which.
    """

    num_used: int
    chosen: Tensor
    shares: Tensor
    place_of: Tensor
    row_of: Tensor
    starts: Tensor
    active: Tensor


def make_pairs(num_rows: int, *, num_experts: int, num_used: int) -> ExpertPairs:
    """Room for the pairs of a step of `num_rows`."""

    def whole(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    return ExpertPairs(
        num_used=num_used,
        chosen=whole(num_rows, num_used),
        shares=torch.zeros(num_rows, num_used),
        place_of=whole(num_rows, num_used),
        row_of=whole(num_rows * num_used),
        starts=whole(num_experts + 1),
        active=whole(num_experts + 1),
    )


def add_route(program: Program, logits: Tensor, pairs: ExpertPairs, *, is_normalized: bool) -> None:
    """Append the choice of each row's likeliest experts, the lower number first on a tie.

    Args:
        logits: [rows, experts] float32.
        is_normalized: a row's shares add up to 1; else they are its probabilities.
    """
    args = RouteArgs(
        logits=address(logits),
        stride=logits.stride(0),
        num_experts=len(pairs.starts) - 1,
        num_used=pairs.num_used,
        chosen=address(pairs.chosen),
        shares=address(pairs.shares),
        place_of=address(pairs.place_of),
        row_of=address(pairs.row_of),
        starts=address(pairs.starts),
        active=address(pairs.active),
        is_normalized=is_normalized,
    )
    for kind in (OpKind.ROUTE, OpKind.GROUP):
        program.add(kind, args, logits, pairs, label="route")


def add_gather_pairs(
    program: Program, x: Tensor, out: Tensor, pairs: ExpertPairs, *, scales: Tensor | None, out_scales: Tensor | None
) -> None:
    """Append out[pair] = x[row of the pair].

    Args:
        x: [rows, width] as linears read it. out: [rows · num_used, width], both dense.
        scales: [rows] float32 of quantized rows, and `out_scales` [rows · num_used]; or None.
    """
    assert (x.shape[1], x.dtype) == (out.shape[1], out.dtype)
    assert x.is_contiguous()
    assert out.is_contiguous()
    args = GatherPairsArgs(
        in_=address(x),
        in_scales=address(scales),
        out=address(out),
        out_scales=address(out_scales),
        row_of=address(pairs.row_of),
        row_bytes=x.stride(0) * x.element_size(),
        num_used=pairs.num_used,
    )
    program.add(OpKind.GATHER_PAIRS, args, x, scales, out, out_scales, pairs, label="route")


def add_experts(
    program: Program, x: Tensor, weights: Sequence[PackedWeight], y: Tensor, pairs: ExpertPairs, *,
    x_scales: Tensor | None, epilogue: Epilogue = Epilogue.STORE, label: str = "experts",
) -> None:  # fmt: skip
    """Append y[pair] = x[pair] · Wᵀ with the weight of the pair's expert.

    Args:
        x, x_scales, y, epilogue: as for `kernels.cpu.linear.add_linear`, a row for each sorted pair.
        weights: of all experts, of one shape and dtype.
    """
    assert len({(weight.dtype, weight.in_features, weight.out_features) for weight in weights}) == 1
    structs = (Weight * len(weights))(*(weight.struct() for weight in weights))
    args = ExpertsArgs(
        linear=linear_args(x, weights[0], y, x_scales=x_scales, epilogue=epilogue),
        weights=ctypes.addressof(structs),
        starts=address(pairs.starts),
        active=address(pairs.active),
    )
    program.add(OpKind.EXPERTS, args, x, x_scales, structs, weights, y, pairs, label=label)


def add_combine(program: Program, x: Tensor, out: Tensor, pairs: ExpertPairs) -> None:
    """Append out[row] += the row's pairs in `x`, each times its share, in the order of the experts' numbers.

    Args:
        x: [rows · num_used, width] float32. out: [rows, width] float32. Both dense.
    """
    assert x.is_contiguous()
    assert out.is_contiguous()
    args = CombineArgs(
        in_=address(x),
        shares=address(pairs.shares),
        place_of=address(pairs.place_of),
        out=address(out),
        width=out.shape[1],
        num_used=pairs.num_used,
    )
    program.add(OpKind.COMBINE, args, x, out, pairs, label="combine")
