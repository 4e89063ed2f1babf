"""What sampling remembers of a sequence on the device: one row of counts and bias for each that needs it.

A row is taken at a sequence's first draw and given back by `release`, cleared. Counts follow `sequence.token_ids`:
each draw first adds the tokens known since the last, so nothing depends on which tokens the engine kept. Rows are
only taken by sequences with penalties or a bias; the tables are made when the first one comes (they are as wide as
the vocabulary).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.engine.sequence import Sequence


class SamplingRows:
    """State of up to `capacity` sequences.

    Args:
        vocab_size: ids that can be drawn; larger ones in a bias have no effect.
    """

    def __init__(self, capacity: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._shape = (capacity, vocab_size)
        self._free = list(range(capacity))[::-1]
        self._num_counted = [0] * capacity
        self._tables: tuple[Tensor, Tensor, Tensor] | None = None

    @staticmethod
    def is_needed(sequence: Sequence) -> bool:
        """Whether `sequence` has a bias or penalties."""
        return bool(sequence.sampling.logit_bias) or sequence.has_penalties

    def update(self, sequence: Sequence) -> int:
        """The row of `sequence`, taken if it has none, counting all tokens it knows."""
        in_prompt, counts, bias = self._tables or self._make_tables()
        row = sequence.sampling_row
        if row is None:
            row = sequence.sampling_row = self._free.pop()
            self._num_counted[row] = 0
            self._set_bias(bias[row], sequence)
        num_prompt, start = sequence.num_prompt_tokens, self._num_counted[row]
        if start < num_prompt:
            in_prompt[row, self._ids(sequence.token_ids[start:num_prompt])] = True
        output = self._ids(sequence.token_ids[max(start, num_prompt) :])
        counts[row].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        self._num_counted[row] = sequence.num_known
        return row

    def in_prompt(self, rows: Tensor) -> Tensor:
        """[rows, vocab] bool: the token occurs in the prompt."""
        return (self._tables or self._make_tables())[0][rows]

    def output_counts(self, rows: Tensor) -> Tensor:
        """[rows, vocab] int32: how often the token was drawn."""
        return (self._tables or self._make_tables())[1][rows]

    def bias(self, rows: Tensor) -> Tensor:
        """[rows, vocab] float32."""
        return (self._tables or self._make_tables())[2][rows]

    def release(self, sequence: Sequence) -> None:
        """Clear and give back the row of `sequence`, if it has one."""
        row, sequence.sampling_row = sequence.sampling_row, None
        if row is None:
            return
        for table in self._tables or ():
            table[row].zero_()
        self._free.append(row)

    def _set_bias(self, bias: Tensor, sequence: Sequence) -> None:
        for token_id, value in sequence.sampling.logit_bias:
            if 0 <= token_id < self._vocab_size:
                bias[token_id] += value

    def _ids(self, token_ids: list[int]) -> Tensor:
        kept = [token_id for token_id in token_ids if 0 <= token_id < self._vocab_size]
        return torch.tensor(kept, dtype=torch.int64, device=self._device)

    def _make_tables(self) -> tuple[Tensor, Tensor, Tensor]:
        dtypes = (torch.bool, torch.int32, torch.float32)
        tables = tuple(torch.zeros(self._shape, dtype=dtype, device=self._device) for dtype in dtypes)
        self._tables = (tables[0], tables[1], tables[2])
        return self._tables
