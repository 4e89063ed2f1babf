"""Triton's greedy choice, random numbers and draw against torch's."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.sampling import TILE, draw_triton, greedy_triton, uniform_triton
from kernels.sampling import draw_reference, greedy_reference, uniform_reference
from tests.kernels.gpu.device import DEVICE, needs_device

pytestmark = needs_device
LARGEST = 1.0 - 2.0**-52


@pytest.mark.parametrize("vocab", [1, 63, 100, TILE - 1, TILE, TILE + 1, 3 * TILE + 5])
def test_greedy(vocab: int) -> None:
    """The largest logit should win, the lowest id on a tie, in views too; NaN should not lead out of the vocabulary."""
    logits = torch.randn(3, vocab + 7).to(DEVICE)[:, :vocab]
    assert torch.equal(greedy_reference(logits), greedy_triton(logits))
    assert greedy_triton(torch.ones(2, vocab, device=DEVICE)).tolist() == [0, 0]
    assert greedy_triton(torch.full((1, vocab), torch.nan, device=DEVICE)).tolist() == [0]
    tied = torch.zeros(1, vocab, device=DEVICE)
    tied[0, vocab // 2 :] = 1.0
    assert greedy_triton(tied).tolist() == [vocab // 2]


@pytest.mark.parametrize("vocab", [1, 100, TILE + 1, 2 * TILE + 5])
def test_draw(vocab: int) -> None:
    """The token should be the one that the walk over the distribution finds, for the smallest and largest numbers too,
    and the same alone."""
    logits = torch.randn(4, vocab).to(DEVICE) * 3
    numbers = torch.tensor([0.0, 0.3, 0.999, LARGEST], dtype=torch.float64).to(DEVICE)
    drawn = draw_triton(logits, numbers)
    assert draw_reference(logits, numbers).tolist() == drawn.tolist()
    for row in range(4):
        assert torch.equal(drawn[row : row + 1], draw_triton(logits[row : row + 1], numbers[row : row + 1]))


def test_what_has_no_weight_is_not_drawn() -> None:
    """Where few tokens are left, numbers at the ends of the range should give one of them."""
    logits = torch.full((3, 2 * TILE), -torch.inf, device=DEVICE)
    kept = [7, TILE + 1, TILE + 3]
    logits[:, kept] = torch.tensor([0.0, 1.0, 2.0], device=DEVICE)
    numbers = torch.tensor([0.0, 0.5, LARGEST], dtype=torch.float64).to(DEVICE)
    assert draw_triton(logits, numbers).tolist() == [7, TILE + 3, TILE + 3]
    assert draw_triton(torch.full((1, 9), torch.nan, device=DEVICE), numbers[:1]).item() < 9


def test_uniform() -> None:
    """Numbers should be the reference's to the last bit, whatever the bits of seed, choice and position."""
    generator = torch.Generator().manual_seed(3)
    seeds = torch.randint(-(2**63), 2**63 - 1, (130,), generator=generator)
    choices, positions = torch.randint(0, 2**32, (2, 130), generator=generator)
    seeds[:3], choices[:2], positions[:2] = torch.tensor([0, -1, 2**62]), 2**32 - 1, torch.tensor([0, 2**32 - 1])
    actual = uniform_triton(seeds.to(DEVICE), choices.to(DEVICE), positions.to(DEVICE))
    assert torch.equal(uniform_reference(seeds, choices, positions), actual.cpu())
