"""A feed-forward layer of experts in the program of the CPU kernels (`experts.py` has the formula)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.model.config import Experts
from gpu_worker.model.cpu_rows import LinearInput, make_input
from gpu_worker.model.packed_weights import PackedExperts
from kernels.cpu.arena import make_buffer
from kernels.cpu.experts import ExpertPairs, add_combine, add_experts, add_gather_pairs, add_route, make_pairs
from kernels.cpu.linear import add_linear
from kernels.cpu.ops import Epilogue
from kernels.cpu.program import Program


@dataclass(frozen=True, slots=True)
class ExpertBuffers:
    """What flows through such a layer; capacity: the largest step.

    Attributes:
        logits: [rows, experts] float32, the router's.
        x, gated: a row for each pair: what experts read, and their gated numbers.
        results: [pairs, hidden] float32.
    """

    experts: Experts
    logits: Tensor
    pairs: ExpertPairs
    x: LinearInput
    gated: LinearInput
    results: Tensor


def make_expert_buffers(experts: Experts, num_rows: int, hidden_size: int, dtype: torch.dtype) -> ExpertBuffers:
    """Buffers for layers of `experts`."""
    num_pairs = num_rows * experts.num_used
    return ExpertBuffers(
        experts=experts,
        logits=make_buffer(num_rows, experts.count, dtype=torch.float32),
        pairs=make_pairs(num_rows, num_experts=experts.count, num_used=experts.num_used),
        x=make_input(num_pairs, hidden_size, dtype),
        gated=make_input(num_pairs, experts.size, dtype),
        results=make_buffer(num_pairs, hidden_size, dtype=torch.float32),
    )


def add_expert_layer(
    program: Program, buffers: ExpertBuffers, layer: PackedExperts, normed: LinearInput, hidden: Tensor, *,
    gate: Epilogue,
) -> None:  # fmt: skip
    """Append hidden += the layer of `normed`, whose floats are there. `hidden`: [rows, hidden] float32."""
    pairs, first, gated = buffers.pairs, layer.experts[0], buffers.gated
    gate_ups, downs = [mlp.gate_up.weight for mlp in layer.experts], [mlp.down.weight for mlp in layer.experts]
    add_linear(program, normed.floats, layer.router, buffers.logits, label="router")
    add_route(program, buffers.logits, pairs, is_normalized=buffers.experts.is_normalized)
    rows, x = normed.add_quantize(program, first.gate_up.weight), buffers.x.rows(first.gate_up.weight)
    add_gather_pairs(program, rows.values, x.values, pairs, scales=rows.scales, out_scales=x.scales)
    add_experts(program, x.values, gate_ups, gated.floats, pairs, x_scales=x.scales, epilogue=gate, label="gate_up")
    inner = gated.add_quantize(program, first.down.weight, per_row=pairs.num_used)
    add_experts(program, inner.values, downs, buffers.results, pairs, x_scales=inner.scales, label="down")
    add_combine(program, buffers.results, hidden, pairs)
