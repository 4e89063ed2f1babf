"""Layers of experts: one after another, and in grouped products as on CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu_worker.model.config import ExpertNames, Experts
from gpu_worker.model.experts import ExpertMlp, LoopedExperts
from gpu_worker.model.layers import GatedMlp, Linear
from gpu_worker.model.llama import group_experts
from gpu_worker.model.weights import MlpWeights, Projection

HIDDEN, SIZE, COUNT = 48, 40, 6
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


def random_weight(out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)


def make_mlp(weights: MlpWeights) -> GatedMlp:
    gate_up = torch.cat((weights.gate.weight, weights.up.weight))
    return GatedMlp(Linear(gate_up), Linear(weights.down.weight), "silu")


@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_grouped_experts_equal_looped_ones(dtype: torch.dtype, is_normalized: bool) -> None:
    """Both should give the same for the same router and weights; the grouped ones can be captured."""
    torch.manual_seed(3)
    names = ExpertNames(router="", gate="", up="", down="")
    config = Experts(count=COUNT, num_used=2, size=SIZE, is_normalized=is_normalized, names=names)
    weights = [
        MlpWeights(
            gate=Projection(weight=random_weight(SIZE, HIDDEN, dtype)),
            up=Projection(weight=random_weight(SIZE, HIDDEN, dtype)),
            down=Projection(weight=random_weight(HIDDEN, SIZE, dtype)),
        )
        for _ in range(COUNT)
    ]
    router = Linear(random_weight(COUNT, HIDDEN, dtype))
    looped = ExpertMlp(config, router, LoopedExperts([make_mlp(mlp) for mlp in weights]))
    grouped = ExpertMlp(config, router, group_experts(weights))
    x = torch.randn(30, HIDDEN).to(dtype)
    torch.testing.assert_close(looped(x), grouped(x), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert looped(x).abs().max() > 0.2
    assert (looped.has_fixed_shapes, grouped.has_fixed_shapes) == (False, True)
