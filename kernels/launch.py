"""Which path an op takes, and the small sums that launchers share.

Importing an op never imports triton: the Triton kernels lie in `kernels/gpu`, which an op imports at its first call
with a CUDA tensor. A CUDA machine without triton runs the torch path.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor

MIN_DOT = 16  # the least size of any side of a Triton dot product


def uses_triton(x: Tensor) -> bool:
    """Whether ops on `x` run as Triton kernels."""
    return x.is_cuda and _has_triton()


def power_of_2(number: int, least: int = 1) -> int:
    """The smallest power of 2 that is at least `number` and at least `least` (itself a power of 2)."""
    return max(least, 1 << (number - 1).bit_length())


def ceil_div(number: int, divisor: int) -> int:
    """`number / divisor`, rounded up."""
    return -(-number // divisor)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
