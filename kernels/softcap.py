"""Softcapping: y = cap · tanh(x / cap), which keeps scores and logits between −cap and cap (Gemma 2).

Element by element, float32; torch's ops on every device.

Design note: tanh is built from exp and division, (1 − e) / (1 + e) with e = exp(−2|x| / cap), for the reason that
`kernels/silu_mul.py` gives. The error is within 2⁻²³ · cap.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softcap(x: Tensor, cap: float) -> Tensor:
    """`x` float32 of any shape, softcapped; a new tensor."""
    small = torch.exp(x.abs() * (-2.0 / cap))
    return torch.copysign((1.0 - small) / (1.0 + small) * cap, x)


def softcap_reference(x: Tensor, cap: float) -> Tensor:
    """The formula in float64."""
    return (torch.tanh(x.double() / cap) * cap).to(x.dtype)
