"""Triton's grouped products of experts against the reference, and row by row."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.expert_matmul import expert_mlp, expert_mlp_reference
from kernels.gpu.expert_matmul import expert_mlp_triton
from tests.kernels.gpu.device import DEVICE, assert_near, needs_device

pytestmark = needs_device


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments of the op."""

    x: Tensor
    shares: Tensor
    chosen: Tensor
    gate_up: Tensor
    down: Tensor

    def run(self, rows: slice | Tensor = slice(None)) -> Tensor:
        return expert_mlp_triton(self.x[rows], self.shares[rows], self.chosen[rows], self.gate_up, self.down)

    def reference(self) -> Tensor:
        return expert_mlp_reference(self.x, self.shares, self.chosen, self.gate_up, self.down)


def make_case(
    rows: int, dtype: torch.dtype, *, num_experts: int = 5, num_used: int = 2, hidden: int = 80, size: int = 100
) -> Case:
    """Rows that choose among all experts but the second, which nobody does."""
    generator = torch.Generator().manual_seed(rows)
    scores = torch.rand(rows, num_experts, generator=generator)
    scores[:, 1] = -1.0
    shares, chosen = scores.topk(num_used, dim=1)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype).to(DEVICE)

    x = (random(rows, hidden + 16) * 8)[:, :hidden]
    weights = random(num_experts, 2 * size, hidden), random(num_experts, hidden, size)
    return Case(x, shares.to(DEVICE), chosen.to(DEVICE), *weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 63, 100])
def test_equals_reference(rows: int, dtype: torch.dtype) -> None:
    """Few rows and many should equal the formula."""
    case = make_case(rows, dtype)
    assert_near(case.reference(), case.run())


@pytest.mark.parametrize(
    ("num_experts", "num_used", "hidden", "size"), [(8, 3, 63, 1), (2, 1, 1, 63), (64, 8, 129, 65)]
)
def test_other_sizes(num_experts: int, num_used: int, hidden: int, size: int) -> None:
    """Sizes around a tile's, one expert a row and many should equal the formula."""
    case = make_case(9, torch.float16, num_experts=num_experts, num_used=num_used, hidden=hidden, size=size)
    assert_near(case.reference(), case.run())


def test_all_rows_may_choose_one_expert() -> None:
    """So should rows that all choose the last expert, whose tiles are then all there are."""
    case = make_case(40, torch.bfloat16, num_used=1)
    case.chosen.fill_(4)
    assert_near(case.reference(), case.run())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alone_equals_in_a_batch(dtype: torch.dtype) -> None:
    """A row should have the same bits alone, among others, and in another place among them."""
    case = make_case(30, dtype)
    together = case.run()
    for row in (0, 7, 29):
        assert torch.equal(together[row], case.run(slice(row, row + 1))[0])
    moved = torch.randperm(30)
    assert torch.equal(together[moved], case.run(moved))


def test_what_disagrees_is_refused() -> None:
    """Weights and choices of other sizes than x should be refused."""
    case = make_case(3, torch.float32)
    with pytest.raises(ValueError, match=r"x \[3, 79\], chosen \[3, 2\], gate_up .* disagree"):
        expert_mlp(case.x[:, 1:], case.shares, case.chosen, case.gate_up, case.down)
    with pytest.raises(ValueError, match="disagree"):
        expert_mlp(case.x, case.shares, case.chosen[:2], case.gate_up, case.down)
