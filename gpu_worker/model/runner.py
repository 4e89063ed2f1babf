"""The model as the engine sees it: a plan goes in, drawn tokens come out.

Design note. A step is *started* and later *finished*; between the two the engine's thread makes the next one ready
(`prepare`), in the other of two sets of inputs. What computes meanwhile differs:

* the CPU kernels: the pool's other threads; the engine's thread joins them in `finish`;
* CUDA: the card. `start` launches all, the sampling too, and `finish` waits for the token ids alone;
* torch on a CPU: nothing. `finish` computes, so that what the engine does right behind a start waits for no step.

A step that was prepared, and is started as it was, only gets its newest tokens put in (`StepInputs.complete`). Any
other is filled in when it starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F

from gpu_worker.engine.batch_plan import DrawnToken
from gpu_worker.engine.chunks import BatchPlan
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.swap import HostMemory
from gpu_worker.lora.adapter import AdapterStore
from gpu_worker.lora.loaded import LoadedAdapters
from gpu_worker.model.graphs import DecodeGraphs
from gpu_worker.model.inputs import Padding, StepInputs
from gpu_worker.model.kv_layout import KvCache
from gpu_worker.model.part_times import PartTimes
from gpu_worker.sampling.sampler import Sampler, is_plainly_greedy

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What a worker tells others about its model. `vocab_size` counts ids that have a token; `key_cost` is the
    arithmetic of one (query, key) pair as a share of a token's in the linears; `window` the tokens that a query sees at
    most, 0: all; `quantization` how its weights are, the checkpoint's own way or one chosen at load."""

    fingerprint: str
    vocab_size: int
    max_model_len: int
    dtype: str
    device: str
    key_cost: float
    window: int = 0
    quantization: str = "none"


class Decoder(Protocol):
    """A way of computing the model: torch's ops (`llama.py`), the CPU kernels (`cpu_decoder.py`) or the code of another
    package (`transformers_decoder.py`).

    A step is started and then waited for, one at a time; `inputs` and `cache` stay as they are until then."""

    def start_logits(self, inputs: StepInputs, cache: KvCache) -> Callable[[], torch.Tensor]:
        """Begin a step that writes its KV into `cache`. The result waits for it: raw logits [wanted rows, vocab]
        float32."""
        ...

    def start_best(self, inputs: StepInputs, cache: KvCache, vocab_size: int) -> Callable[[], list[int]]:
        """Begin a step that writes its KV into `cache`. The result waits for it: the likeliest of the first
        `vocab_size` ids for each wanted row, the lowest on a tie."""
        ...

    def read_hidden(self, rows: list[int]) -> torch.Tensor:
        """Normed hidden states [rows, hidden] float32, on the CPU, of these of the wanted rows of the step that is
        over."""
        ...

    def profile(self) -> dict[str, float]:
        """Seconds by kind of op since the decoder was made; empty where they can't be told apart."""
        ...


@dataclass(frozen=True, slots=True)
class _Filled:
    """A plan whose inputs were filled in, with what that says of how it is computed. `is_greedy`: each of its sampling
    chunks only wants likeliest tokens."""

    plan: BatchPlan
    padding: Padding | None
    is_greedy: bool


class DecoderRunner:
    """A `ModelRunner` over a decoder. One thread uses it.

    Args:
        inputs: one of the two sets; the other is made here.
        graphs: decode steps recorded for a GPU; None: none are.
        adapters: what sequences may run with; None: the model alone.
        host_memory: for blocks of `cache`; the engine has them copied.
    """

    def __init__(self, model: Decoder, cache: KvCache, *, inputs: StepInputs, sampler: Sampler, card: ModelCard,
                 graphs: DecodeGraphs | None = None, host_memory: HostMemory | None = None,
                 adapters: LoadedAdapters | None = None) -> None:  # fmt: skip
        self._graphs = graphs
        self._model, self._cache, self._inputs, self._sampler = model, cache, inputs, sampler
        self._spare = inputs.twin()
        self._prepared: _Filled | None = None
        self._finish: Callable[[], list[DrawnToken]] | None = None
        self._pooled: list[int] = []
        """Which of the step's draws are to give an embedding."""
        self._times = PartTimes()
        self.card = card
        self.adapters = adapters
        self.host_memory = host_memory

    @property
    def adapter_source(self) -> AdapterStore | None:
        """Where adapters come from; None: there are none."""
        return None if self.adapters is None else self.adapters.store

    @property
    def num_blocks(self) -> int:
        """KV blocks; ids 0 .. num_blocks − 1."""
        return self._cache.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._inputs.capacity.block_size

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of the cache that a token takes in a full block."""
        return self._cache.block_bytes / self.block_size

    @property
    def window(self) -> int:
        """Tokens that a query sees at most in any layer, itself among them; 0: all up to it."""
        return self.card.window

    @property
    def key_cost(self) -> float:
        """What one key that a query sees costs, where a token costs 1 beside its keys."""
        return self.card.key_cost

    @property
    def fingerprint(self) -> str:
        """Names weights and arithmetic."""
        return self.card.fingerprint

    @property
    def quantization(self) -> str:
        """Of weights; "none": they are floats."""
        return self.card.quantization

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
        """Of weights: float32, bfloat16, float16."""
        return self.card.dtype

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return self.card.device

    def prepare(self, plan: BatchPlan) -> None:
        """Fill in `plan`, which is probably started next."""
        with self._times.part("inputs"):
            self._prepared = self._fill(self._spare, plan)

    def start(self, plan: BatchPlan) -> None:
        """Begin to write KV for all tokens of `plan` and to draw one token for each sampling chunk, and one more for
        each token of its draft."""
        assert self._finish is None, "the step before was not finished"
        with torch.inference_mode():
            if not plan.chunks:
                self._finish = list
                return
            filled = self._send(plan)
            self._pooled = _pooled_draws(plan)
            if self._graphs is None and filled.is_greedy:
                self._finish = self._start_best()
            else:
                self._finish = self._start_drawing(self._start_logits(filled), *_draws(plan))

    def finish(self) -> list[DrawnToken]:
        """The tokens of the step that was started, in plan order."""
        assert self._finish is not None, "no step was started"
        finish, self._finish = self._finish, None
        with torch.inference_mode():
            drawn = finish()
            self._embed(drawn)
            if not drawn and self.device == "cuda":  # what a step costs is learned from such steps, too
                torch.cuda.current_stream().synchronize()
            return drawn

    def run(self, plan: BatchPlan) -> list[DrawnToken]:
        """`start` and `finish`."""
        self.start(plan)
        return self.finish()

    def compute_logits(self, plan: BatchPlan) -> torch.Tensor:
        """Write KV for all tokens of `plan`; raw logits [tokens to draw, model's vocabulary] float32."""
        with torch.inference_mode():
            return self._start_logits(self._send(plan))()

    def profile(self) -> dict[str, float]:
        """Seconds by part since the runner was made (`bench step --profile` shows what a step adds to them). A name
        with a dot is a share of the part before it: `forward.attention` is in `forward`."""
        ops = {f"forward.{name}": seconds for name, seconds in self._model.profile().items()}
        return self._times.seconds() | ops

    def _embed(self, drawn: list[DrawnToken]) -> None:
        """Put embeddings in place of the draws that are to be ones."""
        rows, self._pooled = self._pooled, []
        if rows:
            vectors = F.normalize(self._model.read_hidden(rows), dim=-1).numpy().astype("<f4")
            for row, vector in zip(rows, vectors, strict=True):
                drawn[row] = DrawnToken(0, embedding=vector.tobytes())

    def _start_logits(self, filled: _Filled) -> Callable[[], torch.Tensor]:
        with self._times.part("start"):
            if self._graphs is not None and filled.padding is not None:
                logits = self._graphs.replay(filled.padding)[: len(filled.plan.chunks)]
                return lambda: logits
            return self._timed(self._model.start_logits(self._inputs, self._cache))

    def _start_best(self) -> Callable[[], list[DrawnToken]]:
        with self._times.part("start"):
            wait = self._timed(self._model.start_best(self._inputs, self._cache, self.vocab_size))
        return lambda: list(map(DrawnToken, wait()))

    def _start_drawing(
        self, logits: Callable[[], torch.Tensor], sequences: list[Sequence], positions: list[int]
    ) -> Callable[[], list[DrawnToken]]:
        if self.device != "cpu":
            return self._launch_drawing(logits(), sequences, positions)

        def draw() -> list[DrawnToken]:
            computed = logits()
            with self._times.part("sampling"):
                return self._sampler.draw(computed, sequences, positions)

        return draw

    def _launch_drawing(
        self, logits: torch.Tensor, sequences: list[Sequence], positions: list[int]
    ) -> Callable[[], list[DrawnToken]]:
        with self._times.part("sampling"):
            return self._timed(self._sampler.begin(logits, sequences, positions))

    def _timed(self, wait: Callable[[], _Result]) -> Callable[[], _Result]:
        def timed() -> _Result:
            with self._times.part("forward"):
                return wait()

        return timed

    def _send(self, plan: BatchPlan) -> _Filled:
        """Have the inputs of `plan` in `_inputs`, as the model reads them."""
        filled, self._prepared = self._prepared, None
        with self._times.part("start"):
            if filled is not None and filled.plan is plan:
                self._inputs, self._spare = self._spare, self._inputs
                self._inputs.complete(plan)
            else:
                filled = self._fill(self._inputs, plan)
            if self.adapters is not None:
                self.adapters.slots.place()
            self._inputs.send()
        return filled

    def _fill(self, inputs: StepInputs, plan: BatchPlan) -> _Filled:
        can_replay = self._graphs is not None and not any(chunk.sequence.is_pooled for chunk in plan.chunks)
        padding = self._graphs.padding_for(plan) if self._graphs is not None and can_replay else None
        inputs.fill(plan, padding, None if self.adapters is None else self.adapters.slots_of(plan))
        is_greedy = all(is_plainly_greedy(chunk.sequence) for chunk in plan.chunks if chunk.is_sampling)
        return _Filled(plan, padding, is_greedy)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has left the batch: free its sampling row."""
        with torch.inference_mode():
            self._sampler.forget(sequence)


def _pooled_draws(plan: BatchPlan) -> list[int]:
    """Those of the plan's draws, by number, that end a prompt whose embedding is wanted."""
    pooled, number = [], 0
    for chunk in plan.chunks:
        if chunk.is_sampling:
            if chunk.sequence.is_pooled and not chunk.is_padding:
                pooled.append(number)
            number += 1 + len(chunk.draft)
    return pooled


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
