"""How the size of the KV cache is decided."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu_worker.model.kv_layout import KV_DTYPES, KvGroup, KvLayout
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
    assert LAYOUT.allocate(1, torch.device("cpu")).scales(0) is None
    assert LAYOUT.block_bytes == BLOCK_BYTES
    cache = LAYOUT.allocate(5, torch.device("cpu"))
    for layer in range(3):
        assert cache.keys(layer).shape == (5, 16, 2, 8)
        cache.keys(layer).fill_(1.0)
        cache.values(layer)[2].fill_(2.0)
    assert cache.num_blocks == 5
    assert all(float(cache.keys(layer).sum()) == 5 * 16 * 2 * 8 for layer in range(3))


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_scales_lie_in_their_block(name: str) -> None:
    """A quantized block should be one run of bytes that holds keys, values and their scales, none over another's."""
    layout = replace(LAYOUT, dtype=KV_DTYPES[name])
    cache = layout.allocate(5, torch.device("cpu"))
    assert layout.block_bytes == 3 * 2 * 16 * 2 * (8 + 2) == 3 * cache.blocks(0)[0].nbytes
    scales = cache.scales(1)
    assert scales is not None
    parts = [cache.keys(1), cache.values(1), scales.key, scales.value]
    assert [tuple(part.shape) for part in parts] == 2 * [(5, 16, 2, 8)] + 2 * [(5, 16, 2)]
    for i, part in enumerate(parts):
        part[3] = i + 1.0
    assert [float(part[3].float().mean()) for part in parts] == [1.0, 2.0, 3.0, 4.0]
    blocks = cache.blocks(1)
    assert not blocks[:3].any()
    assert not blocks[4:].any()


@pytest.mark.parametrize(("name", "least"), [("int8", 1.9), ("fp8", 1.9)])
@pytest.mark.parametrize("is_packed", [False, True])
def test_quantized_blocks_hold_twice_the_tokens(name: str, least: float, is_packed: bool) -> None:
    """int8 and fp8 should hold at least 1.9 times the tokens of bfloat16 in the same bytes, from head size 64 on."""
    for head_size in (64, 80, 128):
        plain = replace(LAYOUT, head_size=head_size, dtype=torch.bfloat16, is_packed=is_packed)
        own = replace(plain, dtype=KV_DTYPES[name])
        num_tokens = [
            size_kv(replace(make_need(), layout=layout), 1 << 28, is_explicit=True).num_tokens
            for layout in (plain, own)
        ]
        assert num_tokens[1] / num_tokens[0] >= least


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


def test_ranks_share_what_there_is() -> None:
    """Blocks of which each of three ranks has its part should be counted with all parts, in errors, too."""
    need = replace(make_need(wanted_len=100), num_ranks=3)
    assert size_kv(need, BLOCK_BYTES * 70 + 5, is_explicit=True).num_blocks == 23
    with pytest.raises(ConfigError, match=rf"{BLOCK_BYTES * 20} bytes hold 96 tokens.*\(7 blocks, {BLOCK_BYTES * 21} "):
        size_kv(need, BLOCK_BYTES * 20, is_explicit=True)


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


def test_more_than_the_system_gives_is_named() -> None:
    """A cache or host memory beyond the address space should be a clear error."""
    with pytest.raises(ConfigError, match=r"KV cache: the system gives no .*--kv-cache-memory-bytes"):
        LAYOUT.allocate(2**60 // BLOCK_BYTES, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"KV cache: the system gives no .*--swap-space"):
        LAYOUT.allocate_host(2**60 // BLOCK_BYTES, is_pinned=False)
