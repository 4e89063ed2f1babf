"""The block copy's contract on CPU."""

from __future__ import annotations

import pytest
import torch

from kernels.kv_copy import kv_copy


def test_blocks_are_copied_whole() -> None:
    """Each target should equal its source and every other block stay; a pair with target −1 is padding."""
    source, target = torch.randn(6, 2, 4, 2, 8), torch.full((3, 2, 4, 2, 8), torch.nan)
    kv_copy(source, target, torch.tensor([5, 0, 2]), torch.tensor([1, -1, 0]))
    assert torch.equal(source[[2, 5]], target[[0, 1]])
    assert bool(target[2].isnan().all())


def test_wrong_blocks_are_refused() -> None:
    """Blocks of another shape, scattered blocks and ids without a partner should be refused."""
    cache, ids = torch.zeros(4, 2, 8), torch.tensor([0])
    with pytest.raises(ValueError, match="blocks of"):
        kv_copy(cache, torch.zeros(4, 2, 9), ids, ids + 1)
    with pytest.raises(ValueError, match="one run"):
        kv_copy(cache.transpose(1, 2), cache.transpose(1, 2), ids, ids + 1)
    with pytest.raises(ValueError, match="target ids"):
        kv_copy(cache, cache, ids, torch.tensor([1, 2]))
