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
from kernels.paged_attention import BatchExtent, PagedBatch

PADDING_SLOT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCapacity:
    """The largest step there can be. `max_wanted`: rows whose logits are wanted."""

    max_tokens: int
    max_sequences: int
    max_wanted: int
    max_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Padding:
    """Makes a step of `num_sequences` one-row sequences out of a smaller one, for a captured graph. The sequences that
    are added have a row of their own, but no query row and no key; `extent` bounds every step of that size."""

    num_sequences: int
    extent: BatchExtent


class _Buffer:
    """One array on the host and, for another device, its copy there."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        is_remote = device.type != "cpu"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=is_remote)
        self._device = torch.zeros(shape, dtype=dtype, device=device) if is_remote else self._host
        self.array: npt.NDArray[np.int64] = self._host.numpy()

    @property
    def tensor(self) -> Tensor:
        """All of it, on the device."""
        return self._device

    def put(self, values: npt.NDArray[np.int64] | list[int], *, padding: int = 0, filler: int = 0) -> Tensor:
        """`values` and `padding` times `filler`, written to the front of the array, on the device."""
        end = len(values) + padding
        self.array[: len(values)] = values
        self.array[len(values) : end] = filler
        return self.send(end)

    def send(self, count: int) -> Tensor:
        """The first `count` entries on the device. Waits for the copy: the next step writes over its source, and a
        step that samples nothing ends without any other wait."""
        if self._device is not self._host:
            self._device[:count].copy_(self._host[:count])
        return self._device[:count]


class StepInputs:
    """Filled anew for each step.

    Attributes after `fill`:
        token_ids, positions, slots: [rows] int64; slot −1: padding.
        batch: query starts, context lengths and block tables of the chunks.
        capacity: as given. wanted_rows: [wanted] int64, rows whose logits are wanted, in plan order: of each sampling
            chunk that of its last known token and those of its draft.

    With padding there are rows and sequences behind the plan's.
    """

    def __init__(self, capacity: StepCapacity, device: torch.device) -> None:
        tokens, sequences = capacity.max_tokens, capacity.max_sequences
        self.capacity = capacity
        self._token_ids = _Buffer((tokens,), torch.int64, device)
        self._positions = _Buffer((tokens,), torch.int64, device)
        self._slots = _Buffer((tokens,), torch.int64, device)
        self._wanted_rows = _Buffer((capacity.max_wanted,), torch.int64, device)
        self._query_starts = _Buffer((sequences + 1,), torch.int32, device)
        self._context_lens = _Buffer((sequences,), torch.int32, device)
        self._block_tables = _Buffer((sequences, capacity.max_blocks), torch.int32, device)
        self._device = device
        self._row_numbers = np.arange(max(tokens, sequences) + 1, dtype=np.int64)
        # For each row of the block tables: the list of blocks it was filled from, and how many. Sequences only append
        # to theirs, and get a new list when they lose their blocks.
        self._written: list[tuple[list[int] | None, int]] = [(None, 0)] * sequences

    @property
    def whole(self) -> dict[str, Tensor]:
        """The buffers in full, by name: where they lie never changes."""
        names = ("token_ids", "positions", "slots", "wanted_rows", "query_starts", "context_lens", "block_tables")
        return {name: getattr(self, f"_{name}").tensor for name in names}

    def fill(self, plan: BatchPlan, padding: Padding | None = None) -> None:
        """Take over `plan`, which with `padding` holds one-row chunks only. A plan beyond the capacity is an error of
        ours."""
        assert plan.num_tokens <= self.capacity.max_tokens, "more tokens than max_num_batched_tokens"
        assert len(plan.chunks) <= self.capacity.max_sequences, "more sequences than max_num_seqs"
        chunks, block_size, num_rows = plan.chunks, self.capacity.block_size, plan.num_tokens
        self._fill_tables(chunks)
        context_lens = np.array([chunk.start + chunk.num_rows for chunk in chunks], dtype=np.int64)
        if num_rows == len(chunks):  # all decode
            end_rows, owners, positions = (
                self._row_numbers[1 : num_rows + 1],
                self._row_numbers[:num_rows],
                context_lens - 1,
            )
        else:
            lengths = np.array([chunk.num_rows for chunk in chunks], dtype=np.int64)
            end_rows, owners = lengths.cumsum(), np.repeat(self._row_numbers[: len(chunks)], lengths)
            positions = self._row_numbers[:num_rows] + np.repeat(context_lens - end_rows, lengths)
        blocks, offsets = np.divmod(positions, block_size)
        slots = self._block_tables.array[owners, blocks] * np.int64(block_size) + offsets
        added = 0 if padding is None else padding.num_sequences - num_rows
        self.token_ids = self._token_ids.put(_step_tokens(chunks), padding=added)
        self.positions = self._positions.put(positions, padding=added)
        self.slots = self._slots.put(slots, padding=added, filler=PADDING_SLOT)
        self._slots.array[num_rows:] = PADDING_SLOT
        self.wanted_rows = self._wanted_rows.put(_wanted_rows(chunks, end_rows.tolist()))
        self._query_starts.array[0] = 0
        self._query_starts.array[1 : len(chunks) + 1] = end_rows
        self._query_starts.array[len(chunks) + 1 : len(chunks) + 1 + added] = num_rows
        self.batch = PagedBatch(
            self._query_starts.send(len(chunks) + 1 + added),
            self._context_lens.put(context_lens, padding=added),
            self._block_tables.send(len(chunks) + added),
            block_size,
            self._extent(end_rows, context_lens) if padding is None else padding.extent,
        )

    def _fill_tables(self, chunks: tuple[PlannedChunk, ...]) -> None:
        """Put the blocks of each chunk's tokens, and of those before it, into its row of the block tables. A row that
        held the same sequence in the step before only gets the blocks that came since."""
        block_size, written = self.capacity.block_size, self._written
        for row, chunk in enumerate(chunks):
            block_ids = chunk.sequence.block_ids
            num_blocks = -(-(chunk.start + chunk.num_rows) // block_size)
            assert len(block_ids) >= num_blocks, "a chunk without blocks for its tokens"
            known, count = written[row]
            if known is not block_ids:
                count = 0
            if count < num_blocks:
                self._block_tables.array[row, count:num_blocks] = block_ids[count:num_blocks]
                count = num_blocks
            written[row] = (block_ids, count)

    def _extent(self, end_rows: npt.NDArray[np.int64], context_lens: npt.NDArray[np.int64]) -> BatchExtent | None:
        """Of the step; only launches on a GPU ask for it."""
        if self._device.type != "cuda":
            return None
        lengths = np.diff(end_rows, prepend=0)
        return BatchExtent(
            min_rows=int(lengths.min()),
            max_rows=int(lengths.max()),
            total_rows=int(lengths.sum()),
            max_context=int(context_lens.max()),
            total_context=int(context_lens.sum()),
        )


def _step_tokens(chunks: tuple[PlannedChunk, ...]) -> list[int]:
    token_ids: list[int] = []
    for chunk in chunks:
        token_ids += chunk.sequence.token_ids[chunk.start : chunk.start + chunk.length]
        token_ids += chunk.draft
    return token_ids


def _wanted_rows(chunks: tuple[PlannedChunk, ...], end_rows: list[int]) -> list[int]:
    """The last known token's row of each sampling chunk, and those of its draft. `end_rows`: behind each chunk."""
    wanted: list[int] = []
    for end, chunk in zip(end_rows, chunks, strict=True):
        if chunk.is_sampling:
            wanted += range(end - len(chunk.draft) - 1, end)
    return wanted
