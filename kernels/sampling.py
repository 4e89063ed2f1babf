"""From logits to one token a row: penalties, the filters' threshold, and the draw by counter-based random numbers.

Layouts: logits [rows, vocab] float32; per-row parameters [rows].

Design note. Every op here treats rows one by one, so that a row's token does not depend on its batch.

* Randomness: Philox4x32-10 (Salmon et al. 2011) with the request's seed as key and (position, choice) as counter
  gives one uniform number a row. There is no state: a sequence that was preempted, moved or resumed goes on with the
  very numbers it would have had.
* min_p, top_k and top_p all keep "the largest ones", so their result is one number a row, the smallest logit kept;
  equal logits are kept or dropped together, which makes the result independent of any sort order.
* The draw walks the cumulative distribution in token order, in float64.
* On CUDA greedy choice, random numbers and the draw are Triton kernels (`kernels/gpu/sampling.py`), the rest is torch.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from kernels.launch import uses_triton

PREFIX = 1024  # largest logits looked at first; a full sort of 150,000 costs 20 times as much and is rarely needed
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def greedy(logits: Tensor) -> Tensor:
    """The id of the largest logit of each row, the lowest on a tie: [rows] int64.

    Args:
        logits: [rows, vocab] float32, any strides.
    """
    if uses_triton(logits):
        from kernels.gpu.sampling import greedy_triton

        return greedy_triton(logits)
    return greedy_reference(logits)


def greedy_reference(logits: Tensor) -> Tensor:
    """The same by torch."""
    return logits.argmax(dim=-1)


def uniform(seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) a row, float64 [rows]; a pure function of its row's three values.

    52 bits, so that the number times a sum is less than that sum after rounding, too.

    Args:
        seeds: [rows] int64 (any bits).
        choices, positions: [rows] int64, 0 .. 2³² − 1.
    """
    if uses_triton(seeds):
        from kernels.gpu.sampling import uniform_triton

        return uniform_triton(seeds, choices, positions)
    return uniform_reference(seeds, choices, positions)


def uniform_reference(seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
    """The same by torch."""
    zero = torch.zeros_like(positions)
    key = (seeds & _MASK, (seeds >> 32) & _MASK)
    high, low, _, _ = philox((positions & _MASK, choices & _MASK, zero, zero), key)
    return ((high << 20) | (low >> 12)).double() * 2.0**-52


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four int64 tensors of 32-bit values from four of counter and two of key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2  # wraps in int64; the bits are right
        c0, c1, c2, c3 = (
            ((second >> 32) & _MASK) ^ c1 ^ k0,
            second & _MASK,
            ((first >> 32) & _MASK) ^ c3 ^ k1,
            first & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def apply_penalties(
    logits: Tensor,
    in_prompt: Tensor,
    output_counts: Tensor,
    *,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Change `logits` [rows, vocab] in place.

    repetition r: logits of tokens that occur in prompt or output are divided by r if positive, else multiplied.
    Then presence · (occurs in output) and frequency · (times in output) are subtracted.

    Args:
        in_prompt: [rows, vocab] bool. output_counts: [rows, vocab] int32.
        repetition, presence, frequency: [rows] float32.
    """
    r = torch.where(in_prompt | (output_counts > 0), repetition[:, None], 1.0)
    logits.copy_(torch.where(logits > 0, logits / r, logits * r))
    logits.sub_(frequency[:, None] * output_counts)
    logits.sub_(presence[:, None] * (output_counts > 0))


def smallest_kept(logits: Tensor, *, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest logit that min_p, then top_k, then top_p keep: [rows] float32.

    min_p keeps tokens of at least min_p times the best one's probability. top_k keeps the k best (0: all). top_p
    keeps the fewest best ones whose share of what is left reaches top_p; the best one always.

    Args:
        logits: [rows, vocab] float32, already divided by the temperature.
        min_p, top_p: [rows] float32. top_k: [rows] int64.
    """
    vocab = logits.shape[1]
    prefix = min(PREFIX, vocab)
    threshold, is_final = _kept_in_prefix(logits, prefix, min_p, top_k, top_p)
    if prefix < vocab and not bool(is_final.all()):
        rest = (~is_final).nonzero().flatten()
        threshold[rest], _ = _kept_in_prefix(logits[rest], vocab, min_p[rest], top_k[rest], top_p[rest])
    return threshold


def draw(logits: Tensor, numbers: Tensor) -> Tensor:
    """Token ids [rows] int64: where the cumulative distribution of each row passes that row's number.

    Args:
        logits: [rows, vocab] float32; −inf for tokens that cannot be drawn; not all of a row.
        numbers: [rows] float64 in [0, 1 − 2⁻⁵²].
    """
    if uses_triton(logits):
        from kernels.gpu.sampling import draw_triton

        return draw_triton(logits, numbers)
    cumulative = torch.softmax(logits, dim=-1).double().cumsum(-1)
    wanted = numbers[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, wanted, right=True).flatten().clamp_(max=logits.shape[1] - 1)


def draw_reference(logits: Tensor, numbers: Tensor) -> Tensor:
    """The same, walking one row and one token at a time."""
    drawn = []
    for row, number in zip(torch.softmax(logits, dim=-1).double().tolist(), numbers.tolist(), strict=True):
        cumulative = list(itertools.accumulate(row))
        drawn.append(next(i for i, passed in enumerate(cumulative) if passed > number * cumulative[-1]))
    return torch.tensor(drawn)


def _kept_in_prefix(logits: Tensor, prefix: int, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """(smallest kept logit, whether the `prefix` largest were enough to know it) of each row."""
    values = logits.topk(prefix, dim=-1).values
    best = values[:, :1]
    floor = best + torch.log(min_p)[:, None]
    limit = torch.where(top_k > 0, top_k, logits.shape[1])[:, None]
    kth = values.gather(1, (limit - 1).clamp(max=prefix - 1))
    floor = torch.where(limit <= prefix, torch.maximum(floor, kth), floor)
    is_kept = values >= floor
    weights = torch.where(is_kept, torch.exp(values - best), 0.0).double()
    before = weights.cumsum(-1) - weights
    total = torch.where(logits >= floor, torch.exp(logits - best), 0.0).double().sum(-1, keepdim=True)
    is_kept &= (before < top_p[:, None] * total) | (top_p[:, None] >= 1.0)
    is_kept[:, 0] = True
    num_kept = is_kept.sum(-1, keepdim=True)
    is_unlimited = limit >= logits.shape[1]
    is_final = (limit <= prefix) | (is_unlimited & (num_kept < prefix))
    return values.gather(1, num_kept - 1).flatten(), is_final.flatten()
