"""Batches whose blocks before the window have been freed."""

from __future__ import annotations

from kernels.paged_attention import PagedBatch, first_key


def free_early(batch: PagedBatch, window: int, num_blocks: int) -> PagedBatch:
    """`batch` with the block of somebody else (one of `num_blocks` that no table names) in place of each block that
    lies wholly before the window of its sequence's first row."""
    tables = batch.block_tables.clone()
    stranger = min(set(range(num_blocks)) - set(tables.flatten().tolist()))
    for sequence, (_, rows, context) in enumerate(batch.chunks()):
        tables[sequence, : first_key(context - rows, window) // batch.block_size] = stranger
    return PagedBatch(batch.query_starts, batch.context_lens, tables, batch.block_size)
