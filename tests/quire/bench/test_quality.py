"""`quire bench quality` on the test model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from quire.bench import quality
from quire.bench.model_cache import ensure_model
from quire.bench.quality import Reading, compare
from shared.errors import ConfigError

WINDOW = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test model."""
    return ensure_model("test", str(tmp_path_factory.mktemp("cache")))


def arguments(folder: Path, tmp_path: Path, *more: str) -> list[str]:
    flags = "--dtype=float32 --num-threads=1 --cpu-kernels=off --kv-cache-memory-bytes=8000000"
    return [str(folder), f"--engine-flags={flags}", f"--window={WINDOW}", "--prompts=3", "--prompt-len=20",
            "--answer-len=4", f"--json={tmp_path / 'figures.json'}", *more]  # fmt: skip


def test_perplexity_is_that_of_transformers(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plain worker's perplexity should be what `transformers` finds over the same windows; the same dtype by name
    should agree in all, and each dtype should have its row and its tokens per gibibyte."""
    from transformers import AutoModelForCausalLM

    text = tmp_path / "text.txt"
    text.write_text(quality.TEXT.read_text()[:400])
    more = ("--kv-cache-dtype", "fp32", "int8", f"--text={text}", "--variants=--kv-cache-dtype=fp8 --block-size=8;")
    assert quality.main(arguments(folder, tmp_path, *more)) == 0
    plain, same, int8, fp8 = json.loads((tmp_path / "figures.json").read_text())["results"]

    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text.read_text()).ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    likelihoods = []
    for start in range(0, len(tokens) - 1, WINDOW):
        window = torch.tensor([tokens[start : start + WINDOW]])
        scores = model(window).logits[0].log_softmax(-1)
        likelihoods += scores[:-1].gather(1, window[0, 1:, None]).flatten().tolist()
    assert plain["perplexity"] == pytest.approx(math.exp(-sum(likelihoods) / len(likelihoods)), rel=1e-3)
    assert same | {"name": "plain"} == plain
    assert (same["same_positions"], same["same_answers"], same["tokens_before_difference"]) == (1.0, 3, 1.0)
    assert int8["tokens_per_gib"] == fp8["tokens_per_gib"] > 3 * plain["tokens_per_gib"]
    assert int8["perplexity"] != plain["perplexity"]
    shown = capsys.readouterr().out
    assert all(f"  {result['name']} " in shown for result in (plain, same, int8, fp8))


def test_agreement_is_counted() -> None:
    """Positions, whole answers and tokens up to the first difference should be counted each by itself."""
    plain = Reading(log_likelihoods=[-1.0, -1.0], likeliest=[1, 2], answers=[[1, 2, 3], [4, 5, 6]], tokens_per_gib=10)
    own = Reading(log_likelihoods=[-1.0, -2.0], likeliest=[1, 3], answers=[[1, 2, 3], [4, 9, 6]], tokens_per_gib=20)
    found = compare("own", plain, own)
    assert found.perplexity_change == pytest.approx(math.exp(0.5) - 1)
    assert (found.same_positions, found.same_answers, found.tokens_before_difference) == (0.5, 1, 4 / 6)


def test_what_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    """Too few blocks, a text that is not there, and one too short should be refused in words."""
    with pytest.raises(ConfigError, match=r"lower --window"):
        quality.main(arguments(folder, tmp_path, "--engine-flags=--kv-cache-memory-bytes=400000", "--window=2000"))
    with pytest.raises(ConfigError, match=r"--text=.*No such file"):
        quality.main(arguments(folder, tmp_path, "--text=/nowhere"))
    text = tmp_path / "text.txt"
    text.write_text("short")
    with pytest.raises(ConfigError, match=r"too few"):
        quality.main(arguments(folder, tmp_path, f"--text={text}"))
