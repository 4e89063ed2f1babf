"""With the CPU kernels a stream's tokens survive a worker in every precision, not in float32 only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.cpu.build import CpuKernelsUnavailable, check_machine
from tests.e2e.cell import Cell
from tests.faults.checker import check_at_rest, check_stream
from tests.faults.kinds import KINDS
from tests.faults.streams import follow_all

LEASE_S = 1.5


@pytest.fixture(autouse=True)
def needs_kernels() -> None:
    try:
        check_machine()
    except CpuKernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("precision", ["--quantization=none", "--quantization=int8", "--quantization=int4"])
async def test_tokens_survive_a_worker_in_other_precisions(
    start_cell: Callable[..., Cell], tmp_path: Path, precision: str
) -> None:
    """All kinds of streams, in blocks too few for all of them at once and with their worker killed under way, should
    give what each gives alone in bfloat16, int8 and int4."""
    flags = ("--dtype=bfloat16", "--cpu-kernels=on", precision)
    quiet = start_cell(*flags, "--max-num-seqs=1")
    expected = await follow_all(quiet.url, KINDS, timeout_s=120)
    quiet.stop()
    cell = start_cell(
        *flags,
        "--workers=2",
        f"--worker-lease-s={LEASE_S}",
        "--max-model-len=512",
        "--kv-cache-memory-bytes=140000",
        "--admission-headroom=0",
        f"--failpoints=worker.before_commit=kill@20#{tmp_path}/latch",
    )
    records = await follow_all(cell.url, KINDS, timeout_s=120)
    assert (tmp_path / "latch").exists(), "no worker was killed"
    for kind, record in records.items():
        assert record.ending == "done", (kind, record.error)
        check_stream(record, expected[kind])
    await check_at_rest(cell.redis_url, cell.url)
