"""Triton kernels of `kernels.expert_matmul`: two grouped products and a sum.

(row, choice) pairs are sorted by expert; a *tile* is some neighbours of one expert, so a program reads its weights once
for all of them. The list of tiles is made on the device (`_lay_out`): the host knows how many there can be, each expert
ends at most one tile early, and programs of tiles that are not there return at once. So nothing waits for the device,
and a captured graph stays true whoever chooses whom. To sort pairs and to cut them into tiles of one expert is the idea
of MegaBlocks (Gale et al., 2022) and of vLLM's fused MoE kernel.

* gate and up: a program gathers its rows of x, multiplies them by both, and writes silu(gate) · up where its pairs lie
  in sorted order: those are neighbours.
* down: reads these, and writes each pair's result to its row and choice.
* sum: a row's choices times their shares, in the order of the experts' numbers.

**A row's result does not depend on its batch within a size of tile**: its products are independent of its tile's
others, and its sum is in a fixed order, without atomic additions. The two sizes may differ in last bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.autotune import MatmulTile, expert_tile
from kernels.launch import ceil_div, power_of_2

BLOCK_K = 64  # inner columns at once: a line of memory
BLOCK_SUM = 1024  # columns of a program of the sum


@triton.jit
def _add_products(sums, x_at, weight_at, is_row, is_column, size, BLOCK_K: tl.constexpr):
    """`sums` [M, N] and x · Wᵀ; x_at [M, 1] and weight_at [N, 1] point to the begin of rows."""
    for start in range(0, size, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        is_inner = (inner < size)[None, :]
        x = tl.load(x_at + inner[None, :], mask=is_row[:, None] & is_inner, other=0.0)
        weight = tl.load(weight_at + inner[None, :], mask=is_column[:, None] & is_inner, other=0.0)
        sums = tl.dot(x, tl.trans(weight), sums, input_precision="ieee")
    return sums


@triton.jit
def _gate_up_kernel(
    out_ptr, x_ptr, weight_ptr, pairs_ptr, tile_experts_ptr, tile_firsts_ptr, tile_ends_ptr, num_experts,
    stride_x_row, inner_features, num_columns, NUM_USED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """silu(gate) · up of one tile of pairs and some of the inner numbers."""
    tile = tl.program_id(0)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert >= num_experts:
        return
    places = tl.load(tile_firsts_ptr + tile) + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = places < tl.load(tile_ends_ptr + tile), columns < num_columns
    rows = tl.load(pairs_ptr + places, mask=is_row, other=0) // NUM_USED
    x_at = x_ptr + (rows.to(tl.int64) * stride_x_row)[:, None]
    gate_at = weight_ptr + ((expert * 2 * num_columns + columns) * inner_features)[:, None]
    up_at = weight_ptr + (((expert * 2 + 1) * num_columns + columns) * inner_features)[:, None]
    dtype = out_ptr.dtype.element_ty
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    gate = _add_products(sums, x_at, gate_at, is_row, is_column, inner_features, BLOCK_K).to(dtype).to(tl.float32)
    up = _add_products(sums, x_at, up_at, is_row, is_column, inner_features, BLOCK_K).to(dtype).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    out_at = out_ptr + places.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(out_at, result.to(dtype), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _down_kernel(
    out_ptr, x_ptr, weight_ptr, pairs_ptr, tile_experts_ptr, tile_firsts_ptr, tile_ends_ptr, num_experts,
    inner_features, num_columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of pairs and some of the hidden numbers; each pair's are written to its own place."""
    tile = tl.program_id(0)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert >= num_experts:
        return
    places = tl.load(tile_firsts_ptr + tile) + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = places < tl.load(tile_ends_ptr + tile), columns < num_columns
    x_at = x_ptr + (places.to(tl.int64) * inner_features)[:, None]
    weight_at = weight_ptr + ((expert * num_columns + columns) * inner_features)[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    sums = _add_products(sums, x_at, weight_at, is_row, is_column, inner_features, BLOCK_K)
    pairs = tl.load(pairs_ptr + places, mask=is_row, other=0).to(tl.int64)
    out_at = out_ptr + pairs[:, None] * num_columns + columns[None, :]
    tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _sum_kernel(out_ptr, x_ptr, shares_ptr, num_columns, NUM_USED: tl.constexpr, BLOCK: tl.constexpr):
    """A row's results times their shares, added up in order."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(NUM_USED):
        pair = row * NUM_USED + choice
        result = tl.load(x_ptr + pair * num_columns + columns, mask=is_column, other=0.0).to(tl.float32)
        total += result * tl.load(shares_ptr + pair)
    tl.store(out_ptr + row * num_columns + columns, total.to(out_ptr.dtype.element_ty), mask=is_column)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """`pairs` [rows · num_used] int32, row · num_used + choice, sorted by expert; of each tile its expert (past the
    last tile: the number of experts) and the range of its pairs in that order, int32 [tiles]."""

    pairs: Tensor
    experts: Tensor
    firsts: Tensor
    ends: Tensor


def expert_mlp_triton(x: Tensor, shares: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """As `kernels.expert_matmul.expert_mlp`, whose checks are done."""
    assert gate_up.is_contiguous(), "an expert's weight is one run of memory"
    assert down.is_contiguous(), "an expert's weight is one run of memory"
    if x.stride(1) != 1:
        x = x.contiguous()
    (num_rows, hidden), (num_experts, _, size), num_used = x.shape, down.shape, chosen.shape[1]
    out = torch.empty((num_rows, hidden), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    chosen, order = chosen.sort(dim=1)
    shares = shares.gather(1, order)
    tile = expert_tile(chosen.numel(), num_experts)
    tiles = _lay_out(chosen.flatten(), num_experts, tile.rows)
    inner = torch.empty((chosen.numel(), size), dtype=x.dtype, device=x.device)
    outer = torch.empty((chosen.numel(), hidden), dtype=x.dtype, device=x.device)
    listed = (tiles.pairs, tiles.experts, tiles.firsts, tiles.ends, num_experts)
    sizes = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": BLOCK_K, **_options(tile)}
    num_tiles = len(tiles.experts)
    _gate_up_kernel[(num_tiles, ceil_div(size, tile.columns))](
        inner, x, gate_up, *listed, x.stride(0), hidden, size, NUM_USED=num_used, **sizes
    )
    _down_kernel[(num_tiles, ceil_div(hidden, tile.columns))](outer, inner, down, *listed, size, hidden, **sizes)
    block = min(BLOCK_SUM, power_of_2(hidden))
    _sum_kernel[(num_rows, ceil_div(hidden, block))](out, outer, shares, hidden, NUM_USED=num_used, BLOCK=block)
    return out


def _options(tile: MatmulTile) -> dict[str, int]:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def _lay_out(chosen: Tensor, num_experts: int, tile_rows: int) -> _Tiles:
    """The tiles of pairs whose experts are `chosen` [pairs]; no wait for the device."""
    experts, pairs = chosen.sort(stable=True)
    numbers = torch.arange(num_experts, device=chosen.device)
    starts, ends = torch.searchsorted(experts, numbers), torch.searchsorted(experts, numbers, right=True)
    tile_ends = ((ends - starts + tile_rows - 1) // tile_rows).cumsum(0)
    max_tiles = len(chosen) // tile_rows + min(num_experts, len(chosen))
    tiles = torch.arange(max_tiles, device=chosen.device)
    of_tile = torch.searchsorted(tile_ends, tiles, right=True)
    known = of_tile.clamp(max=num_experts - 1)
    num_before = tile_ends[known] - (ends - starts + tile_rows - 1)[known] // tile_rows
    firsts = starts[known] + (tiles - num_before) * tile_rows
    return _Tiles(pairs.int(), of_tile.int(), firsts.int(), ends[known].int())
