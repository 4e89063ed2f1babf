"""What every `Decoder` on torch's ops has in common: when a step computes, and what is kept of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from gpu_worker.model.inputs import StepInputs
from gpu_worker.model.kv_layout import KvCache


class TorchDecoder(ABC):
    """Subclasses compute a step, and leave the normed hidden states of its wanted rows in `_wanted_hidden`."""

    def __init__(self) -> None:
        self._wanted_hidden: Tensor | None = None

    def start_logits(self, inputs: StepInputs, cache: KvCache) -> Callable[[], Tensor]:
        """Launch a step that writes its keys and values into `cache`. The result: raw logits [wanted rows, vocab]
        float32. On a CPU it is the call of the result that computes."""
        if inputs.token_ids.device.type == "cpu":
            return lambda: self._compute_logits(inputs, cache)
        logits = self._compute_logits(inputs, cache)
        return lambda: logits

    def start_best(self, inputs: StepInputs, cache: KvCache, vocab_size: int) -> Callable[[], list[int]]:
        """Launch a step that writes its keys and values into `cache`. The result waits for it: the likeliest of the
        first `vocab_size` ids for each wanted row, the lowest on a tie. On a CPU it is the call of it that computes."""
        wait = self.start_logits(inputs, cache)
        if inputs.token_ids.device.type == "cpu":
            return lambda: _find_best(wait(), vocab_size).tolist()
        return _find_best(wait(), vocab_size).tolist

    @abstractmethod
    def _compute_logits(self, inputs: StepInputs, cache: KvCache) -> Tensor:
        """Raw logits [wanted rows, vocab] float32 of a step that writes its keys and values into `cache`."""

    def read_hidden(self, rows: list[int]) -> Tensor:
        """Normed hidden states [rows, hidden] float32, on the CPU, of these of the wanted rows of the step that is
        over."""
        assert self._wanted_hidden is not None, "no step was computed"
        return self._wanted_hidden[rows].float().cpu()

    def profile(self) -> dict[str, float]:
        """Nothing: torch's ops are not timed."""
        return {}


def _find_best(logits: Tensor, vocab_size: int) -> Tensor:
    return logits[:, :vocab_size].argmax(dim=-1)
