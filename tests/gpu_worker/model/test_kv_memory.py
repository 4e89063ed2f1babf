"""How the size of the KV cache is decided."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from gpu_worker.model.kv_layout import KvGroup, KvLayout
from gpu_worker.model.kv_memory import (
    CPU_DEFAULT_MAX_BYTES,
    KvNeed,
    cpu_default_bytes,
    free_host_bytes,
    size_kv,
)
from shared.errors import ConfigError

LAYOUT = KvLayout(groups=(KvGroup(layers=range(3)),), block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
BLOCK_BYTES = 3 * 2 * 16 * 2 * 8 * 4


def make_need(*, wanted_len: int | None = None, model_len: int = 1000, max_num_seqs: int = 4) -> KvNeed:
    return KvNeed(layout=LAYOUT, wanted_len=wanted_len, model_len=model_len, max_num_seqs=max_num_seqs)


def test_layout_bytes_are_what_is_allocated() -> None:
    """A block's bytes should be those of the tensors; keys and values of a block should not overlap."""
    assert LAYOUT.block_bytes == BLOCK_BYTES
    cache = LAYOUT.allocate(5, torch.device("cpu"))
    for layer in range(3):
        assert cache.keys(layer).shape == (5, 16, 2, 8)
        cache.keys(layer).fill_(1.0)
        cache.values(layer)[2].fill_(2.0)
    assert cache.num_blocks == 5
    assert all(float(cache.keys(layer).sum()) == 5 * 16 * 2 * 8 for layer in range(3))


def test_an_unused_cache_takes_no_memory() -> None:
    """A cache on CPU should be zero, and take memory from the machine only for blocks that were written."""
    before = resident_bytes()
    cache = LAYOUT.allocate((256 << 20) // BLOCK_BYTES, torch.device("cpu"))
    assert resident_bytes() - before < 32 << 20
    assert not cache.keys(1)[:100].any()
    cache.keys(0).fill_(1.0)
    assert resident_bytes() - before > 64 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_explicit_size_is_used_in_full() -> None:
    """`--kv-cache-memory-bytes` should give as many blocks as fit, and the numbers of the start-up line."""
    size = size_kv(make_need(wanted_len=100), BLOCK_BYTES * 70 + 5, is_explicit=True)
    assert (size.num_blocks, size.num_tokens, size.max_model_len) == (70, 1120, 100)
    assert size.num_full_requests == 10.0


def test_default_size_stops_at_what_can_be_used() -> None:
    """Without a flag there should be no more blocks than `max_num_seqs` full-length requests fill."""
    size = size_kv(make_need(max_num_seqs=4), BLOCK_BYTES * 10**6, is_explicit=False)
    assert size.num_blocks == 4 * 63
    assert size.num_full_requests == 4.0


def test_context_is_lowered_only_if_not_asked_for() -> None:
    """A cache for 128 tokens should lower the model's context, and refuse one the user asked for, with numbers."""
    assert size_kv(make_need(), BLOCK_BYTES * 8, is_explicit=True).max_model_len == 128
    with pytest.raises(ConfigError, match=r"hold 128 tokens, but --max-model-len is 1000 .* lower --max-model-len"):
        size_kv(make_need(wanted_len=1000), BLOCK_BYTES * 8, is_explicit=True)


@pytest.mark.parametrize("available", [-5, 0, BLOCK_BYTES - 1])
def test_no_block_at_all_is_refused(available: int) -> None:
    """Not even one block: the error should name what to raise."""
    with pytest.raises(ConfigError, match=r"hold no block .*--kv-cache-memory-bytes"):
        size_kv(make_need(), available, is_explicit=True)


def test_default_bytes_leave_most_memory_free() -> None:
    """The CPU default should be a quarter of what is free, at most 4 GiB."""
    assert 0 < cpu_default_bytes() <= min(CPU_DEFAULT_MAX_BYTES, free_host_bytes() // 3)
