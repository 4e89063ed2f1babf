"""Logprobs of the runner against a reference forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu_worker.model.plans import give_blocks, make_runner, make_sequence, plan_step


def test_logprobs_match_a_reference_forward(llama_folder: Path) -> None:
    """Case 43: at each position the listed logprobs should be those of `transformers`, and lists differ by position."""
    from transformers import AutoModelForCausalLM

    runner = make_runner(llama_folder)
    sequence = make_sequence([5, 6, 7], num_logprobs=3, temperature=1.0, seed=4)
    give_blocks([sequence], runner.block_size, 32)
    drawn = []
    for _ in range(5):
        drawn += runner.run(plan_step([sequence], 512))
        sequence.num_computed = sequence.num_known
        sequence.token_ids.append(drawn[-1].token_id)
    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = model(torch.tensor([sequence.token_ids])).logits[0, 2:-1].log_softmax(-1)
    for row, token in zip(expected, drawn, strict=True):
        assert token.logprobs is not None
        assert token.logprobs.chosen == pytest.approx(float(row[token.token_id]), abs=1e-4)
        best = row.topk(3)
        assert [i for i, _ in token.logprobs.top] == best.indices.tolist()
        assert [value for _, value in token.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert len({token.logprobs.top for token in drawn if token.logprobs is not None}) == 5
