"""The least time that a step, a prompt or a workload can take on this machine, from the model's shape and `Limits`.

    step(rows, context)  = max(weight and KV bytes / read rate, operations / peak rate)
    prefill(prompts)     = the same for the layers over all prompt tokens, plus the head over one row a prompt

Every weight is read once a step, each row multiplies with each of them (two operations), and attends to its context:
4 × query size × context operations a layer. A prompt's tokens attend to half of it on average. Nothing else is counted
(norms, sampling, the services), and what is counted is taken to overlap perfectly: no program can be faster, and none
reaches it. A workload's bound computes all prompts first and then steps with whoever is not finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.bench.limits import Limits
from quire.bench.model_shapes import ModelShape

KV_BYTES = 2
ATTENTION_TYPE = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How weights are kept: bytes each in the layers and in the head, and the type of their products."""

    body_bytes: float
    head_bytes: float
    number_type: str


STORAGES = {
    "bf16": Storage(body_bytes=2, head_bytes=2, number_type="bf16"),
    "int8": Storage(body_bytes=1, head_bytes=1, number_type="int8"),
    # 4 bits and a 16-bit scale for every 32 weights; the head stays int8
    "int4": Storage(body_bytes=0.5 + 2 / 32, head_bytes=1, number_type="int8"),
}

Lengths = tuple[int, int]
"""Tokens in and tokens out of one request."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least times, in seconds, of one model in one storage."""

    shape: ModelShape
    storage: Storage
    limits: Limits

    @property
    def weight_bytes(self) -> float:
        """All weights of the linear layers, as they are stored."""
        return _num_body(self.shape) * self.storage.body_bytes + _num_head(self.shape) * self.storage.head_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token over all layers."""
        return self.shape.num_layers * 2 * self.shape.num_kv_heads * self.shape.head_size * KV_BYTES

    def step(self, rows: int, context: float) -> float:
        """One token for each of `rows` sequences that hold `context` tokens on average."""
        num_bytes = self.weight_bytes + rows * context * self.kv_token_bytes
        weights = 2 * (_num_body(self.shape) + _num_head(self.shape))
        return max(num_bytes / self.limits.read, self._compute(rows * weights, rows * self._attention(context)))

    def prefill(self, prompts: Sequence[int], *, num_shared: int = 0) -> float:
        """All tokens of prompts of these lengths, and the logits of the last one of each; the first `num_shared` tokens
        of all but one are known."""
        body, head = _num_body(self.shape), _num_head(self.shape)
        num_known = num_shared * (len(prompts) - 1)
        attention = sum(length * self._attention(length / 2) for length in prompts)
        attention -= num_known * self._attention(num_shared / 2)
        num_tokens = sum(prompts) - num_known
        layers = max(body * self.storage.body_bytes / self.limits.read, self._compute(2 * body * num_tokens, attention))
        logits = max(head * self.storage.head_bytes / self.limits.read, self._compute(2 * head * len(prompts), 0))
        return layers + logits

    def wall(self, requests: Sequence[Lengths], *, num_shared: int = 0) -> float:
        """Requests that come at once, from the first byte in to the last token out; they share their first `num_shared`
        tokens."""
        total = self.prefill([num_in for num_in, _ in requests], num_shared=num_shared)
        for drawn in range(1, max(num_out for _, num_out in requests)):
            contexts = [num_in + drawn for num_in, num_out in requests if num_out > drawn]
            total += self.step(len(contexts), sum(contexts) / len(contexts))
        return total

    def time_per_output_token(self, request: Lengths) -> float:
        """Mean over the tokens after the first one of a request that runs alone."""
        return (self.wall([request]) - self.prefill([request[0]])) / (request[1] - 1)

    def _attention(self, context: float) -> float:
        """Operations of one row over all layers."""
        return 4 * self.shape.num_heads * self.shape.head_size * self.shape.num_layers * context

    def _compute(self, weight_ops: float, attention_ops: float) -> float:
        return weight_ops / self.limits.rate(self.storage.number_type) + attention_ops / self.limits.rate(
            ATTENTION_TYPE
        )


def _num_body(shape: ModelShape) -> int:
    """Weights of the linear layers below the head."""
    hidden, q_size = shape.hidden_size, shape.num_heads * shape.head_size
    kv_size = shape.num_kv_heads * shape.head_size
    return shape.num_layers * (hidden * (2 * q_size + 2 * kv_size) + 3 * hidden * shape.intermediate_size)


def _num_head(shape: ModelShape) -> int:
    return shape.hidden_size * shape.vocab_size
