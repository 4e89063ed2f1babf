"""Where the tests of Triton kernels run: on a CUDA device, or on CPU tensors in Triton's interpreter."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import Tensor

from tests.kernels.gpu.interpreter import IS_INTERPRETED, correct_bfloat16

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
ABSOLUTE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}

needs_device = pytest.mark.skipif(
    not IS_INTERPRETED and not torch.cuda.is_available(), reason="a GPU, but a torch that cannot use it"
)
if IS_INTERPRETED:
    correct_bfloat16()


def assert_near(expected: Tensor, actual: Tensor) -> None:
    """Equal within the tolerance of `actual`'s dtype."""
    torch.testing.assert_close(
        actual.cpu(), expected.cpu().to(actual.dtype), rtol=RELATIVE[actual.dtype], atol=ABSOLUTE[actual.dtype]
    )


def map_blocks(num_blocks: int, *shape: int) -> Tensor:
    """A bfloat16 cache that takes memory only where it is written, on CPU; for ids whose offsets exceed 32 bits."""
    blocks = torch.Size((num_blocks, *shape))
    if DEVICE.type == "cuda":
        return torch.zeros(blocks, dtype=torch.bfloat16, device=DEVICE)
    pages = mmap.mmap(-1, blocks.numel() * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.bfloat16).view(blocks)
