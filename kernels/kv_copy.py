"""Copy whole KV blocks within a cache or between caches: on a card, from the cache to blocks that leave for host memory
and from blocks that came back (`gpu_worker/model/host_memory.py`).

Layouts: a cache of one layer is [num_blocks, ...], each block one contiguous run, as `KvLayout` makes them; what lies
in a block does not matter here. A pair with target id −1 is padding and is not copied.

When which path runs: both caches on one CUDA device: the Triton kernel in `kernels/gpu/kv_copy.py`, one launch and no
memory of its own. Otherwise torch gathers the source's blocks and scatters them into the target.
"""

from __future__ import annotations

from torch import Tensor

from kernels.launch import uses_triton


def kv_copy(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Make block `target_ids[i]` of `target` equal to block `source_ids[i]` of `source`; only `target` changes.

    Args:
        source, target: [num_blocks, ...] of equal block shape and dtype; may be one tensor.
        source_ids, target_ids: [pairs] int64 or int32, on source's device; each target at most once, and in one tensor
            no block is both a source and a target.

    Raises:
        ValueError: blocks differ, are not contiguous, or the ids are not pairs.
    """
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise ValueError(f"blocks of {source.dtype} {list(source.shape[1:])}, {target.dtype} {list(target.shape[1:])}")
    if not (source[:1].is_contiguous() and target[:1].is_contiguous()):
        raise ValueError("a block is not one run of memory")
    if source_ids.dim() != 1 or source_ids.shape != target_ids.shape:
        raise ValueError(f"{list(source_ids.shape)} source ids, {list(target_ids.shape)} target ids")
    if uses_triton(source) and source.device == target.device:
        from kernels.gpu.kv_copy import kv_copy_triton

        return kv_copy_triton(source, target, source_ids, target_ids)
    return kv_copy_reference(source, target, source_ids, target_ids)


def kv_copy_reference(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """The same by gather and scatter."""
    is_copied = target_ids >= 0
    moved = source[source_ids[is_copied].long()].to(target.device)
    target[target_ids[is_copied].long().to(target.device)] = moved
