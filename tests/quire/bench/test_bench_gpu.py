"""`quire bench gpu`, as far as it runs without a card: small cases on CPU, the decode loop, the refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire import cli
from quire.bench.gpu import Limits, describe_time, find_difference, format_report
from quire.bench.gpu_cases import (
    KernelCase,
    ModelSizes,
    attention_case,
    cache_cases,
    expert_case,
    product_cases,
    row_cases,
    sampling_cases,
)
from quire.bench.gpu_decode import decode
from quire.bench.random_model import write_random_model
from shared.config import EngineConfig, ModelConfig, WorkerConfig
from shared.errors import ConfigError

SMALL = ModelSizes(
    heads=4, kv_heads=2, head_size=16, hidden=64, ffn=96, vocab=300, weight_group=32, block_size=8, dtype=torch.float32,
    device="cpu",
)  # fmt: skip
DOCS = Path(__file__).resolve().parents[3] / "docs" / "kernels.md"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")
def test_without_a_card_one_line_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Without CUDA the command should say so in one line and exit with 2."""
    assert cli.main(["bench", "gpu"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "quire: error: quire bench gpu needs a CUDA device, and torch finds none here\n"


def test_every_case_equals_its_reference() -> None:
    """Each case should run, before and after its check, and agree with its reference."""
    cases = [
        attention_case("decode", [(40, 1), (9, 1)], SMALL),
        attention_case("prompt", [(40, 40)], SMALL),
        attention_case("softcapped", [(40, 3)], SMALL, softcap=2.0),
        *row_cases(5, SMALL),
        *cache_cases(5, SMALL),
        *sampling_cases(3, SMALL),
        *product_cases(3, SMALL),
        expert_case(3, SMALL),
    ]
    assert len({case.name for case in cases}) == 13
    for case in cases:
        case.run()
        assert find_difference(case) is None, case.name
        case.run()
        assert case.moved_bytes > 0


def test_table_on_paper_is_that_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/kernels.md should hold the table that the command prints, which needs no card."""
    assert cli.main(["bench", "gpu", "--paper"]) == 0
    table = capsys.readouterr().out
    assert "\n| decode attention, 32 x 4096 | 537.4 | 2.1 | 263.6 µs, memory | 329 µs | 160.4 µs, memory |" in table
    assert table in DOCS.read_text(encoding="utf-8")


def test_a_wrong_result_is_named() -> None:
    """A result that differs, or that is not a number, should be an error instead of a time."""
    for wrong in (2.0, float("nan")):
        case = KernelCase(
            name="x", run=lambda: None, check=lambda w=wrong: (torch.ones(3), torch.full((3,), w)), moved_bytes=1
        )
        difference = find_difference(case)
        assert difference is not None
        assert "WRONG: differs" in format_report({"name": "x", "error": difference})


def test_least_work_is_counted_as_documented() -> None:
    """Bytes and operations should be those of docs/kernels.md: keys and values once, visible pairs only."""
    decode_case = attention_case("d", [(40, 1), (9, 1)], SMALL)
    assert decode_case.moved_bytes == (2 * 49 * 2 * 16 + 2 * 2 * 4 * 16) * 4
    assert decode_case.operations == 4 * 49 * 4 * 16
    chunk = attention_case("c", [(40, 3)], SMALL)
    assert chunk.operations == 4 * (38 + 39 + 40) * 4 * 16
    four_bits, eight_bits = product_cases(3, SMALL)
    moved = 3 * (64 + 192) * 4
    assert four_bits.moved_bytes == 192 * 64 // 2 + 192 * 2 * 3 + moved
    assert eight_bits.moved_bytes == 192 * 64 + 192 * 4 + moved
    assert four_bits.operations == eight_bits.operations == 2 * 3 * 64 * 192
    experts = expert_case(3, SMALL)
    assert experts.moved_bytes == (3 * 6 * 64 * 96 + 2 * 3 * 64) * 4
    assert experts.operations == 6 * 3 * 2 * 64 * 96
    figures = describe_time(chunk, 1e-6, Limits(bytes_per_s=1e12, operations_per_s=chunk.operations * 2e6))
    assert figures["share_of_limit"] == pytest.approx(0.5)


def test_decode_loop(tmp_path: Path) -> None:
    """Prompts cut into chunks and some steps should run and give rates; what does not fit should be refused."""
    folder = write_random_model("tiny", tmp_path / "tiny")
    engine = EngineConfig(device="cpu", max_num_seqs=3, max_num_batched_tokens=16, kv_cache_memory_bytes=1 << 20)
    worker = WorkerConfig(model=ModelConfig(model=str(folder)), engine=engine)
    figures = decode(worker, num_seqs=3, context=20, steps=2)
    assert figures["tokens_per_s"] == pytest.approx(3 / figures["step_ms"] * 1e3)
    assert figures["prompt_tokens_per_s"] > 0
    with pytest.raises(ConfigError, match="longest context"):
        decode(worker, num_seqs=1, context=10**6, steps=1)
