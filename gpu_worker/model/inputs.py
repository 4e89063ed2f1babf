"""The flat arrays of a step, in buffers that live as long as the worker.

Rows are the plan's tokens, chunk after chunk. Capacities are fixed (`max_num_batched_tokens` rows, `max_num_seqs`
chunks), so that a captured graph can be replayed over the same memory; rows past the plan's have slot −1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.engine.batch_plan import BatchPlan, PlannedChunk
from kernels.paged_attention import PagedBatch

PADDING_SLOT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCapacity:
    """The largest step there can be."""

    max_tokens: int
    max_sequences: int
    max_blocks: int
    block_size: int


class _Buffer:
    """One array on the host and, for another device, its copy there."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        is_remote = device.type != "cpu"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=is_remote)
        self._device = torch.zeros(shape, dtype=dtype, device=device) if is_remote else self._host
        self.array: npt.NDArray[np.int64] = self._host.numpy()

    def send(self, count: int) -> Tensor:
        """The first `count` entries on the device."""
        if self._device is not self._host:
            self._device[:count].copy_(self._host[:count], non_blocking=True)
        return self._device[:count]


class StepInputs:
    """Filled anew for each step.

    Attributes after `fill`:
        token_ids, positions, slots: [rows] int64; slot −1: padding.
        batch: query starts, context lengths and block tables of the chunks.
        wanted_rows: [sampling chunks] int64, rows whose logits are wanted, in plan order.
    """

    def __init__(self, capacity: StepCapacity, device: torch.device) -> None:
        tokens, sequences = capacity.max_tokens, capacity.max_sequences
        self._capacity = capacity
        self._token_ids = _Buffer((tokens,), torch.int64, device)
        self._positions = _Buffer((tokens,), torch.int64, device)
        self._slots = _Buffer((tokens,), torch.int64, device)
        self._wanted_rows = _Buffer((sequences,), torch.int64, device)
        self._query_starts = _Buffer((sequences + 1,), torch.int32, device)
        self._context_lens = _Buffer((sequences,), torch.int32, device)
        self._block_tables = _Buffer((sequences, capacity.max_blocks), torch.int32, device)

    def fill(self, plan: BatchPlan) -> None:
        """Take over `plan`. A plan beyond the capacity is an error of ours."""
        assert plan.num_tokens <= self._capacity.max_tokens, "more tokens than max_num_batched_tokens"
        assert len(plan.chunks) <= self._capacity.max_sequences, "more sequences than max_num_seqs"
        first_row, num_wanted = 0, 0
        for index, chunk in enumerate(plan.chunks):
            self._fill_chunk(index, chunk, first_row)
            first_row += chunk.length
            if chunk.is_sampling:
                self._wanted_rows.array[num_wanted] = first_row - 1
                num_wanted += 1
        self._slots.array[first_row:] = PADDING_SLOT
        num_chunks = len(plan.chunks)
        self.token_ids = self._token_ids.send(first_row)
        self.positions = self._positions.send(first_row)
        self.slots = self._slots.send(first_row)
        self.wanted_rows = self._wanted_rows.send(num_wanted)
        self.batch = PagedBatch(
            self._query_starts.send(num_chunks + 1),
            self._context_lens.send(num_chunks),
            self._block_tables.send(num_chunks),
            self._capacity.block_size,
        )

    def _fill_chunk(self, index: int, chunk: PlannedChunk, first_row: int) -> None:
        sequence, block_size = chunk.sequence, self._capacity.block_size
        end, end_row = chunk.start + chunk.length, first_row + chunk.length
        num_blocks = -(-end // block_size)
        assert len(sequence.block_ids) >= num_blocks, "a chunk without blocks for its tokens"
        table = self._block_tables.array[index]
        table[:num_blocks] = sequence.block_ids[:num_blocks]
        positions = np.arange(chunk.start, end)
        self._token_ids.array[first_row:end_row] = sequence.token_ids[chunk.start : end]
        self._positions.array[first_row:end_row] = positions
        self._slots.array[first_row:end_row] = (
            table[positions // block_size].astype(np.int64) * block_size + positions % block_size
        )
        self._query_starts.array[index + 1] = end_row
        self._context_lens.array[index] = end
