"""y = x · Wᵀ + b, with the weight packed once at load time for the machine it runs on.

Layouts: x [rows, in], W [out, in], b [out], y [rows, out]; all of one dtype.

When which path runs: CPU float32 and bfloat16 use oneDNN with the weight in its own blocked order (2–3 times faster
than `F.linear` at few rows); everything else is `F.linear`.

Design note: **a row of y depends on that row of x only, never on how many rows there are.** Measured with torch
2.13.0 (MKL 2024.2, oneDNN 3.12) on Zen 4 with 1 and 2 threads over [in, out] from [64, 512] to [4864, 896] and
[576, 49152], 23 row counts from 1 to 2048, bitwise:

* MKL (`F.linear`, float32) changes rows at 1, 2, 3 (and with two threads 5, 7, 9) rows; multiples of 8 are all equal.
* oneDNN, packed, float32 and bfloat16: all row counts equal but 1, and that differs only where `in` exceeds about
  1000 (another split of the sum). So one row is computed as `MIN_ROWS`. Four, since oneDNN is slower with less: all
  products of SmolLM2-135M with 1 / 2 / 3 / 4 / 8 rows take 50 / 57 / 51 / 42 / 54 ms in float32 and 25 / 26 / 22 / 22 /
  26 ms in bfloat16 (one thread, the fewest of 8 rounds; all packed weights one after another, so none is cached).

As other machines may split elsewhere, float32 is checked when a weight is packed (`_is_row_invariant`, once a size);
if the check fails, products run in calls of exactly `ROW_TILE` rows, which cannot depend on the row count.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_ROWS = 4
ROW_TILE = 32  # 10 % slower per row than one call with 512 rows (float32, 896 → 9728)
_CHECKED_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 64, 100)


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight ready for `linear`. `tensor` is dense [out, in] or oneDNN's opaque packing of it; with `row_tile` set,
    products run in calls of that many rows."""

    tensor: Tensor
    is_packed: bool
    row_tile: int | None = None

    @property
    def out_features(self) -> int:
        return int(self.tensor.shape[0])

    @property
    def in_features(self) -> int:
        return int(self.tensor.shape[1])


def pack_weight(weight: Tensor) -> LinearWeight:
    """`weight` [out, in] in the form that `linear` is fastest with on its device; may share memory with it."""
    if weight.dim() != 2:
        raise ValueError(f"a linear weight is [out, in], not {list(weight.shape)}")
    if not _can_pack(weight):
        return LinearWeight(weight.contiguous(), is_packed=False)
    if weight.dtype == torch.float32 and not _is_row_invariant(*weight.shape, torch.get_num_threads()):
        return LinearWeight(weight.contiguous(), is_packed=False, row_tile=ROW_TILE)
    return LinearWeight(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), is_packed=True)


def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
    """x · Wᵀ + b: [rows, out] in x's dtype, each row independent of the others.

    Args:
        x: [rows, in], of the weight's dtype.
        weight: from `pack_weight`.
        bias: [out] or None.

    Raises:
        ValueError: x does not have `in` columns.
    """
    if x.dim() != 2 or x.shape[1] != weight.in_features:
        raise ValueError(f"x is {list(x.shape)}; the weight takes [rows, {weight.in_features}]")
    if weight.row_tile is not None:
        return _linear_tiled(x, weight.tensor, bias, weight.row_tile)
    if not weight.is_packed:
        return F.linear(x, weight.tensor, bias)
    rows = x.shape[0]
    if rows == 0:
        return x.new_empty((0, weight.out_features))
    if rows < MIN_ROWS:
        return _linear_packed(torch.cat((x,) * MIN_ROWS)[:MIN_ROWS], weight.tensor, bias)[:rows]
    return _linear_packed(x, weight.tensor, bias)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · Wᵀ + b with the dense weight [out, in], accumulated in float32."""
    y = x.float() @ weight.float().T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _linear_packed(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


def _linear_tiled(x: Tensor, weight: Tensor, bias: Tensor | None, row_tile: int) -> Tensor:
    rows = x.shape[0]
    padded = _pad_rows(x, -(-rows // row_tile) * row_tile)
    tiles = [F.linear(tile, weight, bias) for tile in torch.split(padded, row_tile)]
    return torch.cat(tiles)[:rows] if tiles else x.new_empty((0, weight.shape[0]))


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    return x if x.shape[0] == rows else F.pad(x, (0, 0, 0, rows - x.shape[0]))


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


@lru_cache(maxsize=64)
def _is_row_invariant(out_features: int, in_features: int, num_threads: int) -> bool:
    """Whether packed products of this size give the same row whatever the row count (checked, not proved)."""
    del num_threads  # part of the cache key: oneDNN splits work by it
    generator = torch.Generator().manual_seed(0)
    weight = torch.empty(out_features, in_features).normal_(generator=generator)
    x = torch.empty(max(_CHECKED_ROWS), in_features).normal_(generator=generator)
    packed = LinearWeight(torch.ops.mkldnn._reorder_linear_weight(weight), is_packed=True)
    whole = linear(x, packed)
    return all(torch.equal(linear(x[-rows:], packed), whole[-rows:]) for rows in _CHECKED_ROWS)
