"""Blocks come back from host memory bit by bit as they went."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from gpu_worker.engine.swap import BlockCopy, HostMemory
from gpu_worker.model.host_memory import CardHostMemory, CopyRate
from gpu_worker.model.kv_layout import KvCache, KvGroup, KvLayout
from gpu_worker.model.kv_memory import size_host
from gpu_worker.model.runner import DecoderRunner
from shared.errors import ConfigError
from tests.gpu_worker.model.plans import make_runner

LAYOUT = KvLayout(groups=(KvGroup(layers=range(3)),), block_size=4, num_kv_heads=2, head_size=16, dtype=torch.int8)


def out(block: int, host_block: int) -> BlockCopy:
    return BlockCopy(block, host_block, is_back=False)


def back(host_block: int, block: int) -> BlockCopy:
    return BlockCopy(block, host_block, is_back=True)


def fill(cache: KvCache) -> list[torch.Tensor]:
    """Random bytes in all of a cache; a copy of them, by layer [blocks, bytes of a block]."""
    generator = torch.Generator().manual_seed(5)
    for layer in range(cache.num_layers):
        raw = cache.blocks(layer).view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    return read(cache)


def read(cache: KvCache) -> list[torch.Tensor]:
    return [cache.blocks(layer).view(torch.uint8).flatten(1).clone() for layer in range(cache.num_layers)]


def check_round_trips(cache: KvCache, memory: HostMemory) -> None:
    """More blocks than are moved at a time, out, overwritten, and back to others, with a host block used twice."""
    before = fill(cache)
    memory.copy([out(block, block + 1) for block in range(6)])
    for layer in range(cache.num_layers):
        cache.blocks(layer)[:6] = 0
    memory.copy([back(block + 1, 9 - block) for block in range(6)] + [out(4, 2), back(2, 0), out(9, 2), back(2, 1)])
    after = read(cache)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[4:10], old[:6].flip(0))
        assert torch.equal(new[0], old[5])  # what lay in block 4 by then
        assert torch.equal(new[1], old[0])
        assert torch.equal(new[10:], old[10:])
    assert memory.block_copy_s > 0.0


def load(folder: Path, way: str, dtype: str) -> DecoderRunner:
    return make_runner(
        folder, cpu_kernels=way, kv_cache_dtype=dtype, swap_space=1 / 1024, kv_cache_memory_bytes=1 << 20
    )


@pytest.mark.parametrize(
    ("way", "dtype"),
    [*(("off", dtype) for dtype in ("fp32", "bf16", "fp16", "int8", "fp8")),
     *(("on", dtype) for dtype in ("fp32", "bf16", "int8", "fp8"))],
)  # fmt: skip
def test_bits_should_come_back_as_they_went(
    way: str, dtype: str, llama_folder: Path, request: pytest.FixtureRequest
) -> None:
    """All bytes of all layers of a block, scales of quantized ones among them, should come back, in both layouts."""
    if way == "on":
        request.getfixturevalue("cpu_kernels")
    runner = load(llama_folder, way, dtype)
    assert runner.host_memory is not None
    assert runner.host_memory.num_blocks == (1 << 20) // runner._cache.block_bytes
    check_round_trips(runner._cache, runner.host_memory)


class OneQueue:
    """In place of a card's streams: all is done at once. Whoever waits for a mark finds what was queued before it."""

    def __init__(self) -> None:
        self.marks = 0

    def beside(self) -> nullcontext[None]:
        return nullcontext()

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def wait(self, mark: int) -> None:
        assert 0 < mark <= self.marks

    def seconds(self, since: int, mark: int) -> float | None:
        return (mark - since) * 0.001

    def send(self, ids: list[int]) -> torch.Tensor:
        return torch.tensor(ids)


@pytest.mark.parametrize("num_staged", [1, 4, 99])
def test_should_go_over_blocks_on_the_card(num_staged: int) -> None:
    """However few blocks are moved at a time, the same should come back as by the way of a CPU."""
    cache = LAYOUT.allocate(12, torch.device("cpu"))
    host = LAYOUT.allocate_host(8, is_pinned=False)
    check_round_trips(cache, CardHostMemory(cache, host, OneQueue(), num_staged=num_staged))


def test_of_copies_into_one_block_the_last_should_count() -> None:
    """A host block that was given to another sequence before its first copy was made should hold the second one."""
    cache = LAYOUT.allocate(4, torch.device("cpu"))
    memory = CardHostMemory(cache, LAYOUT.allocate_host(2, is_pinned=False), OneQueue())
    before = fill(cache)
    memory.copy([out(0, 1), out(1, 1), out(2, 0), back(1, 3), back(0, 3)])
    assert all(torch.equal(new[3], old[2]) for old, new in zip(before, read(cache), strict=True))
    memory.copy([back(1, 0)])
    assert all(torch.equal(new[0], old[1]) for old, new in zip(before, read(cache), strict=True))


def test_the_rate_should_follow_what_was_measured() -> None:
    """It should be seconds by blocks, and come near to what copies cost now within some of them."""
    rate = CopyRate()
    assert rate.block_s == 0.0
    rate.note(4, 4.0)
    assert rate.block_s == 1.0
    for _ in range(30):
        rate.note(4, 0.4)
    assert rate.block_s == pytest.approx(0.1, rel=0.5)


@pytest.mark.parametrize(
    ("swap_bytes", "cache_bytes", "error"),
    [(1 << 60, 0, "lower it"), (100 * LAYOUT.block_bytes, 1 << 60, "lower it"), (10, 0, "raise it")],
)
def test_should_refuse_what_is_not_there(swap_bytes: int, cache_bytes: int, error: str) -> None:
    """More host memory than is free beside the KV cache, or less than a block, should be refused with the flag."""
    with pytest.raises(ConfigError, match=rf"--swap-space=.*{error}"):
        size_host(swap_bytes, LAYOUT, cache_bytes=cache_bytes)
    assert size_host(10 * LAYOUT.block_bytes + 1, LAYOUT, cache_bytes=0) == 10
    assert size_host(10 * LAYOUT.block_bytes + 1, LAYOUT, cache_bytes=0, num_ranks=3) == 3


def test_no_host_memory_without_a_use(llama_folder: Path) -> None:
    """Where victims compute again, or nothing is asked for, none should be taken."""
    for settings in ({}, {"swap_space": 1.0, "preemption_mode": "recompute"}):
        assert make_runner(llama_folder, cpu_kernels="off", **settings).host_memory is None
