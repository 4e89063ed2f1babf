"""Feed-forward layers of experts, of which each token is computed by a few.

A router gives each row a probability of each expert; the likeliest `num_used` compute it, and their results are added,
weighted by their probabilities. Rows are grouped by expert, so each expert's weights are read once a step.

Design note. A row's result is added up in the order of the experts' numbers and each product's rows are independent
(`kernels/linear.py`), so that its bits do not depend on what else is in the step. How many rows an expert has is known
to the device only, so a step waits for it, and cannot be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpu_worker.model.config import Experts
from gpu_worker.model.layers import GatedMlp, Linear


class ExpertMlp:
    """Feed-forward layer of `experts` behind `router`, hidden → number of experts.

    Args:
        add_up: of the ranks' results, where each has some of the experts' inner numbers; None: these are all.
    """

    def __init__(
        self, config: Experts, router: Linear, experts: Sequence[GatedMlp],
        add_up: Callable[[Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        self._config, self._router, self._experts, self._add_up = config, router, experts, add_up

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] → [rows, hidden]."""
        shares, chosen = self._route(x)
        rows_of = chosen.flatten().argsort(stable=True)  # (row, choice) pairs, by expert
        counts = torch.bincount(chosen.flatten(), minlength=len(self._experts)).tolist()
        out = torch.zeros_like(x)
        for expert, pairs in zip(self._experts, torch.split(rows_of, counts), strict=True):
            if len(pairs):
                rows = pairs // self._config.num_used
                weighted = expert(x[rows]) * shares.flatten()[pairs, None]
                out.index_add_(0, rows, weighted.to(x.dtype))
        return out if self._add_up is None else self._add_up(out)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's shares, float32, and experts, both [rows, num_used]."""
        probabilities = self._router(x).float().softmax(dim=-1)
        shares, chosen = probabilities.topk(self._config.num_used, dim=-1)
        if self._config.is_normalized:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return shares, chosen
