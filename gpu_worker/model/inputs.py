"""The flat arrays of a step, in buffers that live as long as the worker.

Rows are the plan's tokens, chunk after chunk. Capacities are fixed (`max_num_batched_tokens` rows, `max_num_seqs`
chunks), so that a captured graph can be replayed over the same memory; rows past the plan's have slot −1.

Design note. The arrays of one step are filled while another computes, so there are two sets of them (`twin`). A set is
filled on the host, its newest tokens are put in when they are known (`complete`), then it is sent. On a CPU the kernels
read the host's arrays, and nothing is sent. On a GPU both sets share one copy on the device, which a captured
graph reads: what a set sends lies in the stream behind the step before and in front of its own. Host arrays are pinned
and nobody waits for a copy; an event behind the copies says when a set may be filled again, and it is long past by
then, since the other set's step began after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.engine.chunks import BatchPlan, PlannedChunk
from gpu_worker.model.adapter_inputs import Slots, adapter_arrays
from kernels.lora_matmul import AdapterRows, most_groups
from kernels.paged_attention import BatchExtent, PagedBatch

PADDING_SLOT = -1
_FLAT = ("token_ids", "positions", "slots", "wanted_rows", "query_starts", "context_lens")
"""The arrays that `pack` puts one behind another, in front of the block tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCapacity:
    """The largest step there can be. `max_wanted`: rows whose logits are wanted; `max_loras`: adapters."""

    max_tokens: int
    max_sequences: int
    max_wanted: int
    max_blocks: int
    block_size: int
    max_loras: int = 0


@dataclass(frozen=True, slots=True)
class Padding:
    """Makes a step of `num_sequences` one-row sequences out of a smaller one, for a captured graph. The sequences that
    are added have a row of their own, but no query row and no key; `extent` bounds every step of that size."""

    num_sequences: int
    extent: BatchExtent


class _Buffer:
    """One array on the host and, for another device, its copy there.

    Args:
        twin: shares its copy on the device.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, twin: _Buffer | None = None
    ) -> None:
        is_remote = device.type != "cpu"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=is_remote)
        if not is_remote:
            self._device = self._host
        elif twin is not None:
            self._device = twin._device
        else:
            self._device = torch.zeros(shape, dtype=dtype, device=device)
        self.array: npt.NDArray[np.int64] = self._host.numpy()
        self._count = 0

    @property
    def tensor(self) -> Tensor:
        """All of it, on the device."""
        return self._device

    def put(self, values: npt.NDArray[np.int64] | list[int], *, padding: int = 0, filler: int = 0) -> Tensor:
        """`values` and `padding` times `filler`, written to the front of the array; where `send` puts them."""
        end = len(values) + padding
        self.array[: len(values)] = values
        self.array[len(values) : end] = filler
        return self.hold(end)

    def hold(self, count: int) -> Tensor:
        """The first `count` entries, which were written; where `send` puts them."""
        self._count = count
        return self._device[:count]

    @property
    def held(self) -> npt.NDArray[np.int64]:
        """What was written."""
        return self.array[: self._count]

    def send(self) -> None:
        """Queue the copy of what was written: see the module."""
        self._device[: self._count].copy_(self._host[: self._count], non_blocking=True)


class StepInputs:
    """Filled anew for each step: `fill`, perhaps `complete`, then `send`.

    Attributes after `fill`, with their contents on the device after `send`:
        token_ids, positions, slots: [rows] int64; slot −1: padding.
        batch: query starts, context lengths and block tables of the chunks.
        adapters: groups of the rows that have one; None: none has. num_groups, num_wanted_groups: how many there are of
            all rows, and of the wanted ones.
        capacity: as given. wanted_rows: [wanted] int64, rows whose logits are wanted, in plan order: of each sampling
            chunk that of its last known token and those of its draft.

    With padding there are rows and sequences behind the plan's.

    Args:
        twin: another set, which shares the memory on a GPU.
    """

    def __init__(self, capacity: StepCapacity, device: torch.device, twin: StepInputs | None = None) -> None:
        tokens, sequences = capacity.max_tokens, capacity.max_sequences
        self.capacity = capacity
        self._device = device
        self._buffers: dict[str, _Buffer] = {}
        for name, shape, dtype in (
            ("token_ids", (tokens,), torch.int64),
            ("positions", (tokens,), torch.int64),
            ("slots", (tokens,), torch.int64),
            ("wanted_rows", (capacity.max_wanted,), torch.int64),
            ("query_starts", (sequences + 1,), torch.int32),
            ("wanted_starts", (sequences + 1,), torch.int32),
            ("context_lens", (sequences,), torch.int32),
            ("block_tables", (sequences, capacity.max_blocks), torch.int32),
            *_group_buffers(capacity),
        ):
            self._buffers[name] = _Buffer(shape, dtype, device, None if twin is None else twin._buffers[name])
        self.adapters: AdapterRows | None = None
        self.num_groups = self.num_wanted_groups = 0
        self._sent = None if device.type == "cpu" else torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._row_numbers = np.arange(max(tokens, sequences) + 1, dtype=np.int64)
        # For each row of the block tables: the list of blocks it was filled from, and how many. Sequences only append
        # to theirs, and get a new list when they lose their blocks.
        self._written: list[tuple[list[int] | None, int]] = [(None, 0)] * sequences

    @property
    def whole(self) -> dict[str, Tensor]:
        """The buffers in full, by name: where they lie never changes."""
        return {name: buffer.tensor for name, buffer in self._buffers.items()}

    def twin(self) -> StepInputs:
        """Another set, to be filled while a step computes from this one."""
        return StepInputs(self.capacity, self._device, self)

    def fill(self, plan: BatchPlan, padding: Padding | None = None, adapters: Slots | None = None) -> None:
        """Take over `plan`, which with `padding` holds one-row chunks only. A plan beyond the capacity is an error of
        ours. `adapters`: their slots."""
        assert plan.num_tokens <= self.capacity.max_tokens, "more tokens than max_num_batched_tokens"
        assert len(plan.chunks) <= self.capacity.max_sequences, "more sequences than max_num_seqs"
        if self._sent is not None:
            self._sent.synchronize()
        buffers, chunks, block_size, num_rows = self._buffers, plan.chunks, self.capacity.block_size, plan.num_tokens
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
        added = 0 if padding is None else padding.num_sequences - num_rows
        if self.capacity.max_loras:
            self._fill_groups(plan, adapters or {}, None if padding is None else padding.num_sequences)
        self._fill_tables(chunks)
        blocks, offsets = np.divmod(positions, block_size)
        slots = buffers["block_tables"].array[owners, blocks] * np.int64(block_size) + offsets
        self.token_ids = buffers["token_ids"].put(_step_tokens(chunks), padding=added)
        self.positions = buffers["positions"].put(positions, padding=added)
        self.slots = buffers["slots"].put(slots, padding=added, filler=PADDING_SLOT)
        buffers["slots"].array[num_rows:] = PADDING_SLOT
        self.wanted_rows = buffers["wanted_rows"].put(_wanted_rows(chunks, end_rows.tolist()))
        counts = [1 + len(chunk.draft) if chunk.is_sampling else 0 for chunk in chunks]
        buffers["wanted_starts"].array[1 : len(chunks) + 1] = np.cumsum(counts)
        starts = buffers["query_starts"]
        starts.array[0] = 0
        starts.array[1 : len(chunks) + 1] = end_rows
        starts.array[len(chunks) + 1 : len(chunks) + 1 + added] = num_rows
        self.batch = PagedBatch(
            starts.hold(len(chunks) + 1 + added),
            buffers["context_lens"].put(context_lens, padding=added),
            buffers["block_tables"].hold(len(chunks) + added),
            block_size,
            self._extent(end_rows, context_lens) if padding is None else padding.extent,
        )

    def complete(self, plan: BatchPlan) -> None:
        """Put in the tokens of the chunks that hold one each: the last ones of `plan`, which was filled in without
        them, may have been drawn since."""
        token_ids, row = self._buffers["token_ids"].array, 0
        for chunk in plan.chunks:
            if chunk.length == 1:
                token_ids[row] = chunk.sequence.token_ids[chunk.start]
            row += chunk.num_rows

    def pack(self) -> npt.NDArray[np.int64]:
        """What was filled in, without padding, as numbers that `unpack` of another rank's inputs takes: the lengths of
        the arrays and the width of the block tables, then these."""
        arrays = [self._buffers[name].held for name in _FLAT]
        tables = self._buffers["block_tables"].held
        width = -(-int(self._buffers["context_lens"].held.max()) // self.capacity.block_size)
        sizes = np.array([*map(len, arrays), width], dtype=np.int64)
        return np.concatenate((sizes, *arrays, tables[:, :width].ravel()))

    def unpack(self, numbers: npt.NDArray[np.int64]) -> None:
        """Take over what another rank's inputs hold, and have the model read it."""
        if self._sent is not None:
            self._sent.synchronize()
        num_sizes = len(_FLAT) + 1
        *lengths, width = numbers[:num_sizes].tolist()
        *pieces, tables = np.split(numbers[num_sizes:], np.cumsum(lengths))
        arrays = {name: self._buffers[name].put(piece) for name, piece in zip(_FLAT, pieces, strict=True)}
        starts, context_lens = pieces[-2:]
        block_tables = self._buffers["block_tables"]
        block_tables.array[: len(context_lens), :width] = tables.reshape(len(context_lens), width)
        self.token_ids, self.positions, self.slots = arrays["token_ids"], arrays["positions"], arrays["slots"]
        self.wanted_rows = arrays["wanted_rows"]
        self.batch = PagedBatch(
            arrays["query_starts"],
            arrays["context_lens"],
            block_tables.hold(len(context_lens)),
            self.capacity.block_size,
            self._extent(starts[1:], context_lens),
        )
        self.send()

    def send(self) -> None:
        """Have the model read what was filled in."""
        if self._sent is not None:
            for buffer in self._buffers.values():
                buffer.send()
            self._sent.record()

    def _fill_tables(self, chunks: tuple[PlannedChunk, ...]) -> None:
        """Put the blocks of each chunk's tokens, and of those before it, into its row of the block tables. A row that
        held the same sequence when it was last written only gets the blocks that came since."""
        block_size, written, tables = self.capacity.block_size, self._written, self._buffers["block_tables"]
        for row, chunk in enumerate(chunks):
            block_ids = chunk.sequence.block_ids
            num_blocks = -(-(chunk.start + chunk.num_rows) // block_size)
            assert len(block_ids) >= num_blocks, "a chunk without blocks for its tokens"
            known, count = written[row]
            if known is not block_ids:
                count = 0
            if count < num_blocks:
                tables.array[row, count:num_blocks] = block_ids[count:num_blocks]
                count = num_blocks
            written[row] = (block_ids, count)

    def _fill_groups(self, plan: BatchPlan, slots: Slots, padded_rows: int | None) -> None:
        """Group the rows that have an adapter; with `padded_rows` there are as many groups as a step of so many rows
        may have, those behind without rows."""
        self.adapters, self.num_groups, self.num_wanted_groups = None, 0, 0
        if not slots and padded_rows is None:
            return
        buffers, tensors = self._buffers, []
        for name, values in adapter_arrays(plan, slots):
            if padded_rows is not None and not name.startswith("wanted"):
                size = {"group_rows": padded_rows, "group_slots": most_groups(padded_rows, self.capacity.max_loras)}
                most = size.get(name, size["group_slots"] + 1)
                last = int(values[-1]) if name == "group_starts" else 0
                tensors.append(buffers[name].put(values, padding=most - len(values), filler=last))
            else:
                tensors.append(buffers[name].put(values))
        self.num_groups, self.num_wanted_groups = len(tensors[2]), len(tensors[5])
        self.adapters = AdapterRows(tensors[0], tensors[1], tensors[2]) if self.num_groups else None

    def _extent(self, end_rows: npt.NDArray[np.int64], context_lens: npt.NDArray[np.int64]) -> BatchExtent | None:
        """How large the step is; only launches on a GPU ask for it."""
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


def _group_buffers(capacity: StepCapacity) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Of groups of rows and of wanted rows, where there are adapters."""
    buffers: list[tuple[str, tuple[int, ...], torch.dtype]] = []
    for prefix, rows in (("", capacity.max_tokens), ("wanted_", capacity.max_wanted)) if capacity.max_loras else ():
        groups = most_groups(max(rows, capacity.max_sequences), capacity.max_loras)
        sizes = {"group_rows": max(rows, capacity.max_sequences), "group_starts": groups + 1, "group_slots": groups}
        buffers += [(prefix + name, (size,), torch.int32) for name, size in sizes.items()]
    return buffers


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
