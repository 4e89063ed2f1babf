"""The model as the engine sees it: a plan goes in, drawn tokens come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from gpu_worker.engine.batch_plan import BatchPlan, DrawnToken
from gpu_worker.engine.sequence import Sequence
from gpu_worker.model.graphs import DecodeGraphs
from gpu_worker.model.inputs import StepInputs
from gpu_worker.model.kv_layout import KvCache
from gpu_worker.model.part_times import PartTimes
from gpu_worker.sampling.sampler import Sampler, is_plainly_greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What a worker tells others about its model. `vocab_size` counts ids that have a token; `key_cost` is the
    arithmetic of one (query, key) pair as a share of a token's in the linears."""

    fingerprint: str
    vocab_size: int
    max_model_len: int
    dtype: str
    device: str
    key_cost: float


class Decoder(Protocol):
    """A way of computing the model: torch's ops (`llama.py`) or the CPU kernels (`cpu_decoder.py`)."""

    def compute_logits(self, inputs: StepInputs, cache: KvCache) -> torch.Tensor:
        """Raw logits [wanted rows, vocab] float32; writes the step's KV into `cache`."""
        ...

    def compute_best(self, inputs: StepInputs, cache: KvCache, vocab_size: int) -> list[int]:
        """The likeliest of the first `vocab_size` ids for each wanted row, the lowest on a tie; writes KV as well."""
        ...

    def profile(self) -> dict[str, float]:
        """Seconds by kind of op since the decoder was made; empty where they can't be told apart."""
        ...


class DecoderRunner:
    """A `ModelRunner` over a decoder. One thread uses it.

    Args:
        graphs: decode steps recorded for a GPU; None: none are.
    """

    def __init__(self, model: Decoder, cache: KvCache, *, inputs: StepInputs, sampler: Sampler, card: ModelCard,
                 graphs: DecodeGraphs | None = None) -> None:  # fmt: skip
        self._graphs = graphs
        self._model, self._cache, self._inputs, self._sampler = model, cache, inputs, sampler
        self._times = PartTimes()
        self.card = card

    @property
    def num_blocks(self) -> int:
        """KV blocks; ids 0 .. num_blocks − 1."""
        return self._cache.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._inputs.capacity.block_size

    @property
    def key_cost(self) -> float:
        """What one key that a query sees costs, where a token costs 1 beside its keys."""
        return self.card.key_cost

    @property
    def fingerprint(self) -> str:
        """Names weights and arithmetic."""
        return self.card.fingerprint

    @property
    def vocab_size(self) -> int:
        """Ids that have a token."""
        return self.card.vocab_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.card.max_model_len

    @property
    def dtype(self) -> str:
        """Of weights and KV: float32, bfloat16, float16."""
        return self.card.dtype

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return self.card.device

    def run(self, plan: BatchPlan) -> list[DrawnToken]:
        """Write KV for all tokens of `plan` and draw one token for each sampling chunk, in plan order, and one for each
        token of its draft behind it."""
        if not plan.chunks:
            return []
        sequences, positions = _draws(plan)
        with torch.inference_mode():
            if self._graphs is None and all(map(is_plainly_greedy, sequences)):
                return [DrawnToken(token_id) for token_id in self._compute_best(plan)]
            logits = self.compute_logits(plan)
            with self._times.part("sampling"):
                return self._sampler.draw(logits, sequences, positions)

    def compute_logits(self, plan: BatchPlan) -> torch.Tensor:
        """Write KV for all tokens of `plan`; raw logits [tokens to draw, model's vocabulary] float32."""
        if self._graphs is not None:
            with torch.inference_mode(), self._times.part("graph"):
                logits = self._graphs.compute_logits(plan)
            if logits is not None:
                return logits
        with self._times.part("inputs"):
            self._inputs.fill(plan)
        with torch.inference_mode(), self._times.part("forward"):
            return self._model.compute_logits(self._inputs, self._cache)

    def profile(self) -> dict[str, float]:
        """Seconds by part since the runner was made (`bench step --profile` shows what a step adds to them). A name
        with a dot is a share of the part before it: `forward.attention` is in `forward`."""
        ops = {f"forward.{name}": seconds for name, seconds in self._model.profile().items()}
        return self._times.seconds() | ops

    def _compute_best(self, plan: BatchPlan) -> list[int]:
        """Write KV for all tokens of `plan`; the likeliest of each token to draw."""
        with self._times.part("inputs"):
            self._inputs.fill(plan)
        with self._times.part("forward"):
            return self._model.compute_best(self._inputs, self._cache, self.vocab_size)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has left the batch: free its sampling row."""
        with torch.inference_mode():
            self._sampler.forget(sequence)


def _draws(plan: BatchPlan) -> tuple[list[Sequence], list[int]]:
    """For each token to draw: its sequence and its output position."""
    sequences: list[Sequence] = []
    positions: list[int] = []
    for chunk in plan.chunks:
        if chunk.is_sampling:
            first, count = chunk.sequence.num_output, 1 + len(chunk.draft)
            sequences += [chunk.sequence] * count
            positions += range(first, first + count)
    return sequences, positions
