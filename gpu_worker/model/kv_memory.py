"""How many KV blocks there are: from the flags, or from what memory is free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_worker.model.kv_layout import KvLayout
from shared.capacity import blocks_for
from shared.errors import ConfigError

CPU_DEFAULT_SHARE = 0.25  # the default must leave room for other workers and for the page cache that holds the weights
CPU_DEFAULT_MAX_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class KvNeed:
    """What the cache is for. `wanted_len` is the user's `--max-model-len`, None if not given; `model_len` the most that
    the checkpoint allows. `num_resident`: tokens of a sequence that are in blocks at once, 0: all. `num_ranks`: each
    has its part of a block, of `layout`."""

    layout: KvLayout
    wanted_len: int | None
    model_len: int
    max_num_seqs: int
    num_resident: int = 0
    num_ranks: int = 1

    @property
    def block_bytes(self) -> int:
        """Of one block on all ranks."""
        return self.num_ranks * self.layout.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSize:
    """The cache's size, and the longest request that it allows."""

    num_blocks: int
    block_size: int
    max_model_len: int
    num_resident: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_full_requests(self) -> float:
        """How many requests of the full length fit at once."""
        return self.num_blocks / blocks_for(self.max_model_len, self.block_size, self.num_resident)


def size_kv(need: KvNeed, available_bytes: int, *, is_explicit: bool) -> KvSize:
    """The cache that fits into `available_bytes`, those of all ranks.

    An explicit size (`--kv-cache-memory-bytes`) is used in full. Otherwise no more blocks are made than `max_num_seqs`
    requests of full length can hold. If one request of the model's full length does not fit and the user did not ask
    for a length, the length is lowered to what fits.

    Raises:
        ConfigError: not one block, or not one request of the length the user asked for, fits.
    """
    block_size, block_bytes = need.layout.block_size, need.block_bytes
    num_blocks = available_bytes // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"KV cache: {available_bytes} bytes hold no block of {block_bytes} bytes ({block_size} tokens); raise "
            "--kv-cache-memory-bytes (CPU) or --gpu-memory-utilization (CUDA), or lower --block-size"
        )
    max_model_len = need.wanted_len or need.model_len
    full_blocks = blocks_for(max_model_len, block_size, need.num_resident)
    if num_blocks < full_blocks:
        if need.wanted_len is not None:
            raise ConfigError(
                f"KV cache: {available_bytes} bytes hold {num_blocks * block_size} tokens, but --max-model-len is "
                f"{max_model_len} tokens ({full_blocks} blocks, {full_blocks * block_bytes} bytes); lower "
                "--max-model-len, or raise --kv-cache-memory-bytes (CPU) or --gpu-memory-utilization (CUDA)"
            )
        max_model_len = num_blocks * block_size
    elif not is_explicit:
        num_blocks = min(num_blocks, full_blocks * need.max_num_seqs)
    return KvSize(
        num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len, num_resident=need.num_resident
    )


def size_host(swap_bytes: int, layout: KvLayout, *, cache_bytes: int, num_ranks: int = 1) -> int:
    """How many blocks `--swap-space` holds, each rank its part of them.

    Args:
        layout: of one rank.
        cache_bytes: of free memory, those that the KV cache will take, of all ranks.

    Raises:
        ConfigError: none, or the memory is not there.
    """
    free = max(0, free_host_bytes() - cache_bytes)
    if swap_bytes > free:
        raise ConfigError(
            f"--swap-space={swap_bytes / 2**30:g}: beside the KV cache {free / 2**30:.2f} GiB of memory are free; "
            "lower it"
        )
    block_bytes = layout.block_bytes * num_ranks
    if swap_bytes < block_bytes:
        raise ConfigError(
            f"--swap-space={swap_bytes / 2**30:g}: {swap_bytes} bytes hold no block of {block_bytes} bytes "
            f"({layout.block_size} tokens); raise it, or set 0 for none"
        )
    return swap_bytes // block_bytes


def cpu_default_bytes(num_shares: int = 1) -> int:
    """One of `num_shares` parts of a quarter of free memory, at most 4 GiB."""
    return min(int(free_host_bytes() * CPU_DEFAULT_SHARE / num_shares), CPU_DEFAULT_MAX_BYTES)


def cuda_bytes(utilization: float, peak_bytes: int, device: torch.device) -> int:
    """What `utilization` of the card leaves beside `peak_bytes`, the most that a profile run of a full step used
    (weights included). May be negative or zero: nothing is left."""
    _, total = torch.cuda.mem_get_info(device)
    return int(total * utilization) - peak_bytes


def free_host_bytes() -> int:
    """Memory that this process may still take: what the machine has free, and what its container allows."""
    free = _meminfo_available()
    limit, used = (_read_int(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("cannot see how much memory is free; set --kv-cache-memory-bytes")


def _read_int(path: Path) -> int | None:
    """The number in a kernel file; None when it is missing or says "max"."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
