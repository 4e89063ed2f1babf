"""Triton kernels of `kernels.sampling`: greedy choice, random numbers and the draw. Filters and penalties stay torch's.

A vocabulary is cut into tiles of constant size, one program each, so that one row alone fills a card; a last program
a row puts the tiles together. The draw reads the logits three times (torch's softmax, conversion to float64, running
sum and search move about 50 bytes for each logit, these kernels 12, the later reads mostly from the cache): the tiles'
largest, the tiles' sums of weights, then only the tile in which the number falls. Sums are float64, weights
exp(logit − largest) float32. Within rounding (1e-7 of the distribution) of a border between two tokens the result may
differ from torch's, whose weights are rounded otherwise; it never depends on other rows, and a token of weight 0 is
never drawn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import ceil_div, power_of_2

TILE = 4096  # part of the numbers; 150,000 logits are 37 programs
UNIFORM_BLOCK = 128


@triton.jit
def _load_logits(logits_ptr, row, ids, stride_row, stride_token, VOCAB: tl.constexpr):
    """Logits at `ids`, float32; −inf past the vocabulary and for NaN, so that no comparison goes astray."""
    at = logits_ptr + row.to(tl.int64) * stride_row + ids * stride_token
    logits = tl.load(at, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.where(logits == logits, logits, float("-inf"))  # noqa: PLR0124  (false for NaN)


@triton.jit
def _best_of_tile_kernel(
    best_ptr, best_id_ptr, logits_ptr, stride_row, stride_token, VOCAB: tl.constexpr, TILE: tl.constexpr
):
    row, tile = tl.program_id(0), tl.program_id(1)
    logits = _load_logits(logits_ptr, row, tile * TILE + tl.arange(0, TILE), stride_row, stride_token, VOCAB)
    best, best_index = tl.max(logits, 0, return_indices=True, return_indices_tie_break_left=True)
    at = row * tl.num_programs(1) + tile
    tl.store(best_ptr + at, best)
    tl.store(best_id_ptr + at, tile * TILE + best_index)


@triton.jit
def _best_of_row_kernel(out_ptr, best_ptr, best_id_ptr, num_tiles, BLOCK_T: tl.constexpr):
    row, tiles = tl.program_id(0), tl.arange(0, BLOCK_T)
    best = tl.load(best_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    _, tile = tl.max(best, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out_ptr + row, tl.load(best_id_ptr + row * num_tiles + tile).to(tl.int64))


@triton.jit
def _best_of_tiles(best_ptr, row, num_tiles, BLOCK_T: tl.constexpr):
    """The row's largest logit; 0 for a row of −inf only."""
    tiles = tl.arange(0, BLOCK_T)
    best = tl.max(tl.load(best_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf")), 0)
    return tl.where(best == float("-inf"), 0.0, best)


@triton.jit
def _weigh_tile_kernel(
    sum_ptr, best_ptr, logits_ptr, stride_row, stride_token,
    VOCAB: tl.constexpr, TILE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    row, tile, num_tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    logits = _load_logits(logits_ptr, row, tile * TILE + tl.arange(0, TILE), stride_row, stride_token, VOCAB)
    weights = tl.exp(logits - _best_of_tiles(best_ptr, row, num_tiles, BLOCK_T)).to(tl.float64)
    tl.store(sum_ptr + row * num_tiles + tile, tl.sum(weights, 0))


@triton.jit
def _draw_kernel(
    out_ptr, numbers_ptr, sum_ptr, best_ptr, logits_ptr, num_tiles, stride_row, stride_token,
    VOCAB: tl.constexpr, TILE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Find the tile in which the number falls, then the token. If the tile's own running sum, rounded otherwise than
    its total, does not reach the number, its last token with a weight is taken."""
    row, tiles = tl.program_id(0), tl.arange(0, BLOCK_T)
    sums = tl.load(sum_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=0.0)
    cumulative = tl.cumsum(sums, 0)
    wanted = tl.load(numbers_ptr + row) * tl.max(cumulative, 0)
    tile = tl.minimum(tl.sum((cumulative <= wanted).to(tl.int32), 0), num_tiles - 1)
    before = tl.max(tl.where(tiles < tile, cumulative, 0.0), 0)
    ids = tile * TILE + tl.arange(0, TILE)
    logits = _load_logits(logits_ptr, row, ids, stride_row, stride_token, VOCAB)
    weights = tl.exp(logits - _best_of_tiles(best_ptr, row, num_tiles, BLOCK_T)).to(tl.float64)
    is_passed = (before + tl.cumsum(weights, 0) > wanted) & (weights > 0.0)
    first = tl.min(tl.where(is_passed, ids, VOCAB), 0)
    last = tl.max(tl.where(weights > 0.0, ids, 0), 0)
    tl.store(out_ptr + row, tl.minimum(first, last).to(tl.int64))


@triton.jit(do_not_specialize=["num_rows"])
def _uniform_kernel(out_ptr, seeds_ptr, choices_ptr, positions_ptr, num_rows, BLOCK: tl.constexpr):
    """Philox4x32-10 with key (seed's low half, high half) and counter (position, choice, 0, 0)."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_rows
    seeds = tl.load(seeds_ptr + rows, mask=is_row, other=0)
    choices = tl.load(choices_ptr + rows, mask=is_row, other=0).to(tl.uint32)
    positions = tl.load(positions_ptr + rows, mask=is_row, other=0).to(tl.uint32)
    zero = tl.zeros((BLOCK,), tl.uint32)
    high, low, _, _ = tl.philox(seeds, positions, choices, zero, zero)
    bits = (high.to(tl.int64) << 20) | (low >> 12).to(tl.int64)
    tl.store(out_ptr + rows, bits.to(tl.float64) * 2.220446049250313e-16, mask=is_row)  # 2⁻⁵²


def greedy_triton(logits: Tensor) -> Tensor:
    """As `kernels.sampling.greedy`."""
    rows = logits.shape[0]
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        best, best_ids = _best_of_tiles_of(logits)
        num_tiles = best.shape[1]
        _best_of_row_kernel[(rows,)](out, best, best_ids, num_tiles, BLOCK_T=power_of_2(num_tiles), num_warps=1)
    return out


def draw_triton(logits: Tensor, numbers: Tensor) -> Tensor:
    """As `kernels.sampling.draw`."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    best, _ = _best_of_tiles_of(logits)
    num_tiles = best.shape[1]
    sums = torch.empty_like(best, dtype=torch.float64)
    sizes = {"VOCAB": vocab, "TILE": TILE, "BLOCK_T": power_of_2(num_tiles)}
    _weigh_tile_kernel[(rows, num_tiles)](sums, best, logits, *logits.stride(), **sizes)
    _draw_kernel[(rows,)](out, numbers, sums, best, logits, num_tiles, *logits.stride(), **sizes)
    return out


def uniform_triton(seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
    """As `kernels.sampling.uniform`."""
    rows = seeds.shape[0]
    out = torch.empty(rows, dtype=torch.float64, device=seeds.device)
    if rows:
        _uniform_kernel[(ceil_div(rows, UNIFORM_BLOCK),)](
            out, seeds.contiguous(), choices.contiguous(), positions.contiguous(), rows, BLOCK=UNIFORM_BLOCK
        )
    return out


def _best_of_tiles_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each tile and its id (the lowest on a tie): [rows, tiles] float32 and int32."""
    rows, vocab = logits.shape
    num_tiles = ceil_div(vocab, TILE)
    best = torch.empty((rows, num_tiles), dtype=torch.float32, device=logits.device)
    best_ids = torch.empty((rows, num_tiles), dtype=torch.int32, device=logits.device)
    _best_of_tile_kernel[(rows, num_tiles)](best, best_ids, logits, *logits.stride(), VOCAB=vocab, TILE=TILE)
    return best, best_ids
