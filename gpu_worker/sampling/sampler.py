"""From a step's logits to tokens, one a row, in vLLM's order of processors.

padded vocabulary cut off → bans (`min_tokens`) → logit bias → penalties → greedy: the largest, lowest id on a tie;
else temperature → min_p → top_k → top_p → draw with the number of (seed, choice, output position). Logprobs are those
of the raw model (before all of that).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gpu_worker.engine.batch_plan import DrawnToken
from gpu_worker.engine.sequence import Sequence
from gpu_worker.sampling.rows import SamplingRows
from kernels import sampling as ops
from kernels.cpu.choose import Chooser
from shared.log import Logprobs
from shared.messages import SamplingParams

GREEDY_TEMPERATURE = 1e-5  # below it a division would overflow; vLLM's bound


class Sampler:
    """Draws tokens; holds the rows of sequences that need memory.

    Args:
        vocab_size: ids that have a token; logits beyond are padding and never drawn.
        max_num_seqs: most sequences at once.
        chooser: chooses tokens with the CPU kernels; None: torch does.
    """

    def __init__(
        self, *, vocab_size: int, max_num_seqs: int, device: torch.device, chooser: Chooser | None = None
    ) -> None:
        self._chooser = chooser
        self._vocab_size = vocab_size
        self._device = device
        self._rows = SamplingRows(max_num_seqs, vocab_size, device)

    def draw(self, logits: Tensor, sequences: list[Sequence], positions: list[int] | None = None) -> list[DrawnToken]:
        """One token for each row.

        Args:
            logits: [rows, at least vocab_size] float32; overwritten.
            sequences: of each row. One with penalties has one row only.
            positions: output position of each row; default: the next one of its sequence.
        """
        return self.begin(logits, sequences, positions)()

    def begin(
        self, logits: Tensor, sequences: list[Sequence], positions: list[int] | None = None
    ) -> Callable[[], list[DrawnToken]]:
        """As `draw`, with the result to be called for: on a GPU the tokens are chosen in stream order, and only the
        result waits for them."""
        if not sequences:
            return list
        positions = [s.num_output for s in sequences] if positions is None else positions
        raw = self._raw_logprobs(logits, sequences)
        logits = logits[:, : self._vocab_size]
        self._apply_bans(logits, sequences, positions)
        self._apply_memory(logits, sequences)
        choose = self._choose if self._chooser is None else partial(self._choose_by_kernel, self._chooser)
        token_ids = choose(logits, sequences, positions)
        return lambda: [
            DrawnToken(token_id, None if row is None else _to_logprobs(row, token_id, sequence.sampling.num_logprobs))
            for token_id, row, sequence in zip(token_ids.tolist(), raw, sequences, strict=True)
        ]

    def forget(self, sequence: Sequence) -> None:
        """Give back the row of `sequence`."""
        self._rows.release(sequence)

    def _raw_logprobs(self, logits: Tensor, sequences: list[Sequence]) -> list[Tensor | None]:
        """Log-probabilities [vocab_size] of each row that wants some, of the whole model's distribution."""
        return [
            None if s.sampling.num_logprobs is None else torch.log_softmax(logits[i], dim=-1)[: self._vocab_size]
            for i, s in enumerate(sequences)
        ]

    def _apply_bans(self, logits: Tensor, sequences: list[Sequence], positions: list[int]) -> None:
        """No end token before `min_tokens`, in place."""
        for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
            if position < sequence.sampling.min_tokens:
                banned = [i for i in sequence.sampling.stop_token_ids if 0 <= i < self._vocab_size]
                logits[row, self._put(banned, torch.int64)] = -torch.inf

    def _apply_memory(self, logits: Tensor, sequences: list[Sequence]) -> None:
        """Bias and penalties, in place."""
        needing = [i for i, s in enumerate(sequences) if self._rows.is_needed(s)]
        if not needing:
            return
        chosen = [sequences[i] for i in needing]
        index = self._put(needing, torch.int64)
        rows = self._put([self._rows.update(s) for s in chosen], torch.int64)
        changed = logits[index] + self._rows.bias(rows)
        if any(s.has_penalties for s in chosen):
            ops.apply_penalties(
                changed,
                self._rows.in_prompt(rows),
                self._rows.output_counts(rows),
                repetition=self._floats(chosen, lambda p: p.repetition_penalty),
                presence=self._floats(chosen, lambda p: p.presence_penalty),
                frequency=self._floats(chosen, lambda p: p.frequency_penalty),
            )
        logits[index] = changed

    def _choose_by_kernel(
        self, chooser: Chooser, logits: Tensor, sequences: list[Sequence], positions: list[int]
    ) -> Tensor:
        """The same as `_choose`, on the CPU kernels."""
        rules, count = chooser.rules, len(sequences)
        params = [s.sampling for s in sequences]
        rules.temperatures[:count] = self._floats(sequences, _temperature)
        rules.min_p[:count] = self._floats(sequences, lambda p: p.min_p)
        rules.top_p[:count] = self._floats(sequences, lambda p: p.top_p)
        rules.top_k[:count] = torch.tensor([p.top_k for p in params])
        rules.seeds[:count] = torch.tensor([_to_int64(p.seed) for p in params])
        rules.choices[:count] = torch.tensor([s.choice for s in sequences])
        rules.positions[:count] = torch.tensor(positions)
        return chooser.choose(logits)

    def _choose(self, logits: Tensor, sequences: list[Sequence], positions: list[int]) -> Tensor:
        token_ids = ops.greedy(logits)
        drawn = [i for i, s in enumerate(sequences) if s.sampling.temperature >= GREEDY_TEMPERATURE]
        if drawn:
            index = self._put(drawn, torch.int64)
            token_ids[index] = self._choose_random(
                logits[index], [sequences[i] for i in drawn], [positions[i] for i in drawn]
            )
        return token_ids

    def _choose_random(self, logits: Tensor, sequences: list[Sequence], positions: list[int]) -> Tensor:
        logits = logits / self._floats(sequences, lambda p: p.temperature)[:, None]
        filtered = [i for i, s in enumerate(sequences) if _has_filter(s.sampling)]
        if filtered:
            index = self._put(filtered, torch.int64)
            chosen, part = [sequences[i] for i in filtered], logits[index]
            smallest = ops.smallest_kept(
                part,
                min_p=self._floats(chosen, lambda p: p.min_p),
                top_k=self._ints(chosen, lambda s: s.sampling.top_k),
                top_p=self._floats(chosen, lambda p: p.top_p),
            )
            logits[index] = part.masked_fill(part < smallest[:, None], -torch.inf)
        numbers = ops.uniform(
            self._ints(sequences, lambda s: _to_int64(s.sampling.seed)),
            self._ints(sequences, lambda s: s.choice),
            self._put(positions, torch.int64),
        )
        return ops.draw(logits, numbers)

    def _floats(self, sequences: list[Sequence], read: Callable[[SamplingParams], float]) -> Tensor:
        return self._put([read(s.sampling) for s in sequences], torch.float32)

    def _ints(self, sequences: list[Sequence], read: Callable[[Sequence], int]) -> Tensor:
        return self._put([read(s) for s in sequences], torch.int64)

    def _put(self, values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
        """`values` on the device; nobody waits for the copy."""
        is_remote = self._device.type != "cpu"
        return torch.tensor(values, dtype=dtype, pin_memory=is_remote).to(self._device, non_blocking=True)


def is_plainly_greedy(sequence: Sequence) -> bool:
    """Whether the sequence's next token is the likeliest one, and nothing else is asked: no logprobs, ban or memory."""
    sampling = sequence.sampling
    return (
        sampling.temperature < GREEDY_TEMPERATURE
        and sampling.num_logprobs is None
        and sequence.num_output >= sampling.min_tokens
        and not SamplingRows.is_needed(sequence)
    )


def _temperature(sampling: SamplingParams) -> float:
    return sampling.temperature if sampling.temperature >= GREEDY_TEMPERATURE else 0.0


def _has_filter(sampling: SamplingParams) -> bool:
    return sampling.min_p > 0.0 or sampling.top_k > 0 or sampling.top_p < 1.0


def _to_int64(seed: int) -> int:
    """The low 64 bits of `seed` as a signed number."""
    low = seed & 0xFFFFFFFFFFFFFFFF
    return low - (1 << 64) if low >> 63 else low


def _to_logprobs(row: Tensor, token_id: int, count: int | None) -> Logprobs:
    """The drawn token's log-probability and the `count` largest, best first, lowest id on a tie."""
    values, ids = row.topk(min(count or 0, row.shape[0]))
    best = sorted(zip(values.tolist(), ids.tolist(), strict=True), key=lambda pair: (-pair[0], pair[1]))
    return Logprobs(float(row[token_id]), tuple((i, value) for value, i in best))
