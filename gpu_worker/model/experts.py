"""Feed-forward layers of experts, of which each token is computed by a few.

A router gives each row a probability of each expert; the likeliest `num_used` compute it, and their results are added,
weighted by their probabilities. Rows are grouped by expert, so each expert's weights are read once a step.

Design note. A row's result is added up in the order of the experts' numbers and each product's rows are independent
(`kernels/linear.py`, `kernels/expert_matmul.py`), so that its bits do not depend on what else is in the step. How many
rows an expert has is known to the device only: `LoopedExperts` waits for it, and cannot be captured as a CUDA graph;
`GroupedExperts` does not ask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpu_worker.model.config import Experts
from gpu_worker.model.layers import GatedMlp, Linear
from kernels.expert_matmul import expert_mlp


class LoopedExperts:
    """Experts one after another: any weights, any gate."""

    has_fixed_shapes = False

    def __init__(self, experts: Sequence[GatedMlp]) -> None:
        self._experts = experts

    def __call__(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """[rows, hidden] → [rows, hidden]; shares, float32, and experts of each row, both [rows, num_used]."""
        rows_of = chosen.flatten().argsort(stable=True)  # (row, choice) pairs, by expert
        counts = torch.bincount(chosen.flatten(), minlength=len(self._experts)).tolist()
        out = torch.zeros_like(x)
        for expert, pairs in zip(self._experts, torch.split(rows_of, counts), strict=True):
            if len(pairs):
                rows = pairs // chosen.shape[1]
                weighted = expert(x[rows]) * shares.flatten()[pairs, None]
                out.index_add_(0, rows, weighted.to(x.dtype))
        return out


class GroupedExperts:
    """Experts of one shape, with gates of silu and weights of floats, in grouped products.

    Args:
        gate_up: [experts, 2 · size, hidden]. down: [experts, hidden, size].
    """

    has_fixed_shapes = True

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        self._gate_up, self._down = gate_up, down

    def __call__(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """As `LoopedExperts`."""
        return expert_mlp(x, shares, chosen, self._gate_up, self._down)


class ExpertMlp:
    """Feed-forward layer of `experts` behind `router`, hidden → number of experts.

    Args:
        add_up: of the ranks' results, where each has some of the experts' inner numbers; None: these are all.
    """

    def __init__(
        self, config: Experts, router: Linear, experts: LoopedExperts | GroupedExperts,
        add_up: Callable[[Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        self._config, self._router, self._experts, self._add_up = config, router, experts, add_up

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether its launches depend on the number of rows only."""
        return self._experts.has_fixed_shapes

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] → [rows, hidden]."""
        out = self._experts(x, *self._route(x))
        return out if self._add_up is None else self._add_up(out)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's shares, float32, and experts, both [rows, num_used]."""
        probabilities = self._router(x).float().softmax(dim=-1)
        shares, chosen = probabilities.topk(self._config.num_used, dim=-1)
        if self._config.is_normalized:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return shares, chosen
