"""y = x · Wᵀ + b with a weight of 4 bits in groups (AWQ, GPTQ), dequantized on the way to the products.

    W[o, i] = (n[o, i] − zero[o, g]) · scale[o, g], rounded to x's dtype; n in 0 … 15, g = i // group

Layout of a packed weight, the same for AWQ and GPTQ: `words` int32 [ceil(in / 128) · 16, out]. 128 neighbouring columns
are 16 words of an output: bits 4p … 4p + 3 of word j hold column 16p + j. So

* neighbours in memory are neighbours along `out`: what threads of a warp load lies side by side, whole lines of it;
* a shift of a [16, outputs] tile of words gives 16 neighbouring columns, which is what a product of tensor cores takes:
  nothing is shuffled between threads to unpack;
* 16 columns are within one group, whose scale is one number an output.

Columns are filled up to a multiple of 128; x counts as 0 there. `scales` float16 and `zeros` uint8 are [groups, out].
Where GPTQ chose groups by the size of activations (desc_act), columns lie in the groups' order, and x is gathered by
`order` before.

On CUDA the Triton kernel in `kernels/gpu/int4_matmul.py` runs; elsewhere the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.launch import ceil_div, uses_triton

PACKED_COLUMNS = 128  # of `in`, in 16 words
PART = 16  # columns that one shift unpacks: what one product takes
PER_WORD = 8
MIDDLE = 8
"""The zero point of symmetric weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weight:
    """A packed weight [out, in]; see the module for `words`, `scales` and `zeros`.

    Attributes:
        zeros: None: `MIDDLE` everywhere.
        group: columns of a group; 0: a group is a row.
        order: int64 [in], column i multiplies x[:, order[i]]; None: x[:, i].
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    in_features: int
    group: int
    order: Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.words.shape[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """What it stands for, [out, in] of `dtype`, columns as they lie."""
        shifts = torch.arange(0, 4 * PER_WORD, 4, dtype=torch.int32, device=self.words.device)
        tiles = self.words.view(-1, 1, PART, self.out_features) >> shifts[:, None, None]
        values = (tiles & 15).view(-1, self.out_features)[: self.in_features].float()
        repeats = self.group or self.in_features
        scales, zeros = (
            None if x is None else x.float().repeat_interleave(repeats, dim=0)[: self.in_features]
            for x in (self.scales, self.zeros)
        )
        assert scales is not None
        return ((values - (MIDDLE if zeros is None else zeros)) * scales).to(dtype).T


def repack_int4(
    values: Tensor, scales: Tensor, zeros: Tensor | None, group: int, order: Tensor | None = None
) -> Int4Weight:
    """The packed form of a weight, on the device of `values`.

    Args:
        values: uint8 [out, in], 0 … 15. scales: [out, groups], any float dtype.
        zeros: [out, groups], any integer dtype, 0 … 16; None: `MIDDLE` everywhere.
        group: columns of a group: a divisor or a multiple of 128 and of 16, or at least `in`, or −1: a row.
        order: int64 [in]; see `Int4Weight`.

    Raises:
        ValueError: a group that the kernels do not have, sizes that disagree, or a scale that is no finite float16.
    """
    out_features, in_features = values.shape
    group = 0 if group < 0 or group >= in_features else group
    if group % PART or (group and PACKED_COLUMNS % group and group % PACKED_COLUMNS):
        raise ValueError(f"groups of {group} columns: only 16, 32, 64, multiples of 128 and whole rows are supported")
    expected = (out_features, ceil_div(in_features, group or in_features))
    half = scales.to(torch.float16)
    if half.shape != expected or (zeros is not None and zeros.shape != expected):
        raise ValueError(f"scales are {list(scales.shape)}, and this weight has {list(expected)} groups")
    if not bool(half.isfinite().all()):
        raise ValueError("a scale is not finite in float16")
    tiles = F.pad(values, (0, -in_features % PACKED_COLUMNS)).view(out_features, -1, PER_WORD, PART)
    shifts = torch.arange(0, 4 * PER_WORD, 4, device=values.device)
    words = (tiles.long() << shifts[:, None]).sum(2).flatten(1)
    return Int4Weight(
        words=words.to(torch.int32).T.contiguous(),  # the upper half becomes negative: the same 32 bits
        scales=half.T.contiguous(),
        zeros=None if zeros is None else zeros.to(torch.uint8).T.contiguous(),
        in_features=in_features,
        group=group,
        order=order,
    )


def int4_matmul(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """x · Wᵀ + b, [rows, out] in x's dtype, summed in float32. A row's bits do not depend on the other rows as long as
    there are at most 16, and not while there are more than 64.

    Args:
        x: [rows, in]. bias: [out], any float dtype, or None.

    Raises:
        ValueError: sizes disagree.
    """
    if x.shape[1] != weight.in_features:
        raise ValueError(f"x is {list(x.shape)}, the weight has {weight.in_features} columns")
    if not uses_triton(x):
        return int4_matmul_reference(x, weight, bias)
    from kernels.gpu.int4_matmul import int4_matmul_triton

    return int4_matmul_triton(x, weight, bias)


def int4_matmul_reference(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """The formula, products in float32."""
    gathered = x if weight.order is None else x.index_select(1, weight.order)
    product = F.linear(gathered.float(), weight.dequantize(x.dtype).float(), None if bias is None else bias.float())
    return product.to(x.dtype)
