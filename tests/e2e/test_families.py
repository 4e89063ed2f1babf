"""Model families that are not Llama, from HTTP to the model and back, over a worker's death."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.cell import Cell
from tests.e2e.reference import GreedyReference
from tests.e2e.test_equality import make_bodies, read_token_ids
from tests.faults.checker import check_at_rest
from tests.faults.streams import follow_all
from tests.gpu_worker.model.tiny_families import FAMILIES, write_tiny_model

IN_MAKE_TEST = {"gemma3", "qwen3_moe"}
VOCAB_SIZE = 512
"""That of the tokenizer of the `test` model, which these get."""
PROMPTS = [[(11 * i + number) % 490 for i in range(length)] for number, length in enumerate((3, 150, 60, 17))]


def write_model(name: str, folder: Path, tokenizer_of: Path) -> Path:
    """A tiny random model of the family, with a tokenizer."""
    write_tiny_model(FAMILIES[name] | {"vocab_size": VOCAB_SIZE}, folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_of / file, folder)
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_MAKE_TEST else pytest.mark.slow) for name in FAMILIES]
)
async def test_tokens_are_those_of_transformers_over_a_workers_death(
    start_cell: Callable[..., Cell], model_folder: Path, tmp_path: Path, name: str
) -> None:
    """Streams whose worker is killed on the way should go on at the next one with the tokens of transformers."""
    folder = write_model(name, tmp_path / f"tiny-{name}", model_folder)
    latch = tmp_path / "latch"
    killing = f"--failpoints=worker.before_commit=kill@20#{latch}"
    cell = start_cell("--max-num-batched-tokens=48", "--max-model-len=256", killing, model=folder)
    records = await follow_all(cell.url, make_bodies(PROMPTS, folder.name), timeout_s=120)
    assert latch.exists(), "no worker was killed"
    assert {record.ending for record in records.values()} == {"done"}, [r.error for r in records.values() if r.error]
    reference = GreedyReference(folder)
    for prompt, actual in zip(PROMPTS, await read_token_ids(cell.redis_url, records), strict=True):
        assert reference.explain_mismatch(prompt, actual) == ""
    await check_at_rest(cell.redis_url, cell.url)
