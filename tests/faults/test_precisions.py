"""With the CPU kernels a stream's tokens survive a worker in every precision, not in float32 only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.cpu.build import CpuKernelsUnavailable, best_isa, check_machine
from tests.e2e.cell import Cell
from tests.faults.checker import check_at_rest, check_stream, read_metrics
from tests.faults.kinds import KINDS
from tests.faults.streams import follow_all

LEASE_S = 1.5
MAX_ROUNDS = 6
"""Drafts are tried while they pay by the time that steps took, which a loaded machine may hide for a round."""
SPECULATION = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
FEW_WORDS = {"logit_bias": {"100": 100, "110": 100, "120": 100}}
REPEATING = {
    "few-words": KINDS["greedy"] | FEW_WORDS,
    "few-words-seeded": KINDS["seeded"] | FEW_WORDS | {"temperature": 0.5},
    "few-words-n-2": KINDS["n-2"] | FEW_WORDS | {"temperature": 0.3, "logprobs": 1},
    "few-words-stop": KINDS["stop-string"] | FEW_WORDS | {"max_tokens": 60, "stop": None, "stop_token_ids": [120],
                                                          "min_tokens": 25},
}  # fmt: skip


@pytest.fixture(autouse=True)
def needs_kernels() -> None:
    try:
        check_machine(best_isa())
    except CpuKernelsUnavailable as error:
        pytest.skip(str(error))


POOL_BYTES = {"int8": 78_750, "fp8": 78_750}
"""What holds as many tokens of such a cache as 140,000 bytes hold of bfloat16."""


@pytest.mark.parametrize(
    "precision",
    [
        "--quantization=none",
        "--quantization=int8",
        "--quantization=int4",
        "--kv-cache-dtype=int8",
        pytest.param("--kv-cache-dtype=fp8", marks=pytest.mark.slow),
    ],
)
async def test_tokens_survive_a_worker_in_other_precisions(
    start_cell: Callable[..., Cell], tmp_path: Path, precision: str
) -> None:
    """All kinds of streams, in blocks too few for all of them at once and with their worker killed under way, should
    give what each gives alone in bfloat16, int8 and int4, and with quantized keys and values."""
    pool_bytes = POOL_BYTES.get(precision.removeprefix("--kv-cache-dtype="), 140_000)
    flags = ("--dtype=bfloat16", "--cpu-kernels=on", precision)
    quiet = start_cell(*flags, "--max-num-seqs=1")
    expected = await follow_all(quiet.url, KINDS, timeout_s=120)
    quiet.stop()
    cell = start_cell(
        *flags,
        "--workers=2",
        f"--worker-lease-s={LEASE_S}",
        "--max-model-len=512",
        f"--kv-cache-memory-bytes={pool_bytes}",
        "--admission-headroom=0",
        f"--failpoints=worker.before_commit=kill@20#{tmp_path}/latch",
    )
    records = await follow_all(cell.url, KINDS, timeout_s=120)
    assert (tmp_path / "latch").exists(), "no worker was killed"
    for kind, record in records.items():
        assert record.ending == "done", (kind, record.error)
        check_stream(record, expected[kind])
    await check_at_rest(cell.redis_url, cell.url)


@pytest.mark.parametrize("flags", [("--dtype=bfloat16", "--cpu-kernels=on"), ("--dtype=float32", "--cpu-kernels=off")])
async def test_tokens_survive_a_worker_that_speculates(
    start_cell: Callable[..., Cell], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """Streams of which some repeat themselves should give what they give without speculation, in blocks too few for all
    at once and with their worker killed after it has written several tokens at a time."""
    kinds = KINDS | REPEATING
    quiet = start_cell(*flags, "--max-num-seqs=1")
    expected = await follow_all(quiet.url, kinds, timeout_s=120)
    quiet.stop()
    cell = start_cell(
        *flags,
        f"--speculative-config={SPECULATION}",
        "--workers=2",
        f"--worker-lease-s={LEASE_S}",
        "--max-model-len=512",
        "--kv-cache-memory-bytes=280000",
        "--admission-headroom=0",
        f"--failpoints=worker.before_commit=kill@20#{tmp_path}/latch",
    )
    accepted, rounds = 0.0, 0
    while accepted <= 20 and rounds < MAX_ROUNDS:
        records = await follow_all(cell.url, kinds, timeout_s=120)
        assert (tmp_path / "latch").exists(), "no worker was killed"
        for kind, record in records.items():
            assert record.ending == "done", (kind, record.error)
            check_stream(record, expected[kind])
        metrics = await read_metrics(cell.url)
        accepted, rounds = metrics["vllm:spec_decode_num_accepted_tokens_total"], rounds + 1
    assert 20 < accepted < metrics["vllm:spec_decode_num_draft_tokens_total"]
    await check_at_rest(cell.redis_url, cell.url)
