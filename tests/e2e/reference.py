"""What `transformers` alone says: greedy generation in fp32, one request at a time.

A whole output is checked with one forward pass over prompt and output: if each token is the argmax behind its prefix,
then, by induction, the output is what greedy generation gives. That also shows the margin at every position.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

MARGIN_TOLERANCE = 1e-4


class GreedyReference:
    """A checkpoint in `transformers`, fp32."""

    def __init__(self, model_folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        self._model.eval()

    @torch.inference_mode()
    def logits(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """[len(output), vocabulary] fp32: the logits from which each token of `output` is drawn."""
        return self._model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]

    def logprobs(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """The same as natural log-probabilities."""
        return self.logits(prompt, output).log_softmax(dim=-1)

    def explain_mismatch(self, prompt: list[int], output: list[int]) -> str:
        """Empty when `output` is the greedy one (up to ties closer than `MARGIN_TOLERANCE`), else the first difference
        with the margin between the reference's best two logits there; printed in both cases."""
        logits = self.logits(prompt, output)
        for position, token_id in enumerate(output):
            best = logits[position].topk(2)
            expected, margin = int(best.indices[0]), float(best.values[0] - best.values[1])
            if token_id != expected:
                text = f"output token {position}: expected {expected}, got {token_id}; top-2 margin {margin:.3g}"
                print(text)
                return text if margin > MARGIN_TOLERANCE else ""
        return ""
