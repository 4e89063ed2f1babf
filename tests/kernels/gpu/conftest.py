"""What a kernel reads before it was written is NaN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _nan_in_new_memory() -> Iterator[None]:
    """`torch.empty` gives NaN (and the largest integers), so that a kernel which leaves some of it shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
