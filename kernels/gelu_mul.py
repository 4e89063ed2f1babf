"""The gate of Gemma's feed-forward layer: gelu(gate) · up, with gelu's approximation by tanh.

gelu(z) = z / 2 · (1 + tanh(u)) with u = √(2/π) · (z + 0.044715 z³), which is z / (1 + exp(−2u)).

Layouts: gate_up [rows, 2 · size] (gate columns first), result [rows, size]. torch's ops on every device.

Design note: float32 on a CPU is built from exp, division and product, for the reason that `kernels/silu_mul.py` gives:
an element's bits must not depend on where it lies in the tensor.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) · up: [rows, size] in the dtype of `gate_up` [rows, 2 · size]."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up is {list(gate_up.shape)}: the last dimension is not even")
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_up.dtype != torch.float32 or gate_up.device.type != "cpu":
        return F.gelu(gate, approximate="tanh").mul_(up)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + torch.exp(-2.0 * inner)) * up


def gelu_mul_reference(gate_up: Tensor) -> Tensor:
    """The formula by torch's own gelu in float64, rounded once."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)
