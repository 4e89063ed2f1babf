"""Workers of several ranks: the tokens of one rank, and a death that clients see as a pause."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.e2e.cell import Cell
from tests.faults.checker import check_at_rest, check_stream
from tests.faults.kinds import KINDS
from tests.faults.streams import StreamRecord, follow
from tests.waiting import wait_until, wait_until_async

StartCell = Callable[..., Cell]
LEASE_S = 1.5
TWO_RANKS = ("--tensor-parallel-size=2", f"--worker-lease-s={LEASE_S}")


def _ranks(cell: Cell) -> list[psutil.Process]:
    """The other ranks of the worker."""
    children = psutil.Process(cell.pids["worker-0"]).children()
    assert all("gpu_worker.parallel" in child.cmdline() for child in children)
    return children


@pytest.mark.parametrize("victim", ["rank", "first rank"])
async def test_a_dead_rank_costs_a_pause(
    start_cell: StartCell, undisturbed: dict[str, StreamRecord], victim: str
) -> None:
    """kill -9 of a rank in mid-stream should end its worker, whole, which is started again; streams go on at the tokens
    of a worker with one rank."""
    cell = start_cell(*TWO_RANKS)
    old, (rank,) = cell.pids["worker-0"], _ranks(cell)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session:
        records = {kind: StreamRecord() for kind in KINDS}
        url = cell.url + "/v1/completions"
        followed = asyncio.gather(*(follow(session, url, KINDS[k], record=r) for k, r in records.items()))

        async def has_begun() -> bool:
            return records["greedy"].num_events >= 5

        await wait_until_async(has_begun, description="a stream", timeout_s=30)
        if victim == "rank":
            rank.kill()
        else:
            cell.kill("worker-0", signal.SIGKILL)
        cell.wait_restarted("worker-0", old)
        wait_until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, description="the rank's end")
        await followed
    for kind, record in records.items():
        assert record.ending == "done", (kind, record.error)
        check_stream(record, undisturbed[kind])
    assert [child.pid for child in _ranks(cell)] != [rank.pid]
    assert ("rank.died rank=1" in cell.log()) == (victim == "rank")
    await check_at_rest(cell.redis_url, cell.url)


async def test_ranks_end_with_their_worker(start_cell: StartCell) -> None:
    """A cell that is told to stop should end with no word of dead ranks, and leave none of them behind."""
    cell = start_cell(*TWO_RANKS, "--workers=2")
    ranks = [child for name in ("worker-0", "worker-1") for child in psutil.Process(cell.pids[name]).children()]
    assert len(ranks) == 2, "workers of one machine should not be in each other's way"
    assert cell.stop() == 0
    psutil.wait_procs(ranks, timeout=5)
    assert not [rank for rank in ranks if rank.is_running()]
    assert "rank." not in cell.log()
    assert "ranks." not in cell.log()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tensor-parallel-size=3",), "--tensor-parallel-size=3: LlamaForCausalLM has 4 attention heads, which do "
                                        "not divide among 3 ranks; sizes that fit: 1, 2, 4"),
        (("--tensor-parallel-size=2", "--enable-lora"), "--tensor-parallel-size=2: adapters (--enable-lora) are for "
                                                        "one rank only; leave one of the two flags out"),
        (("--tensor-parallel-size=2", "--model-impl=transformers"),
         "--tensor-parallel-size=2: transformers computes LlamaForCausalLM (--model-impl), in one rank only; leave"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused_once(
    flags: tuple[str, ...], message: str, start_cell: StartCell, tmp_path: Path
) -> None:
    """What several ranks don't compute should end the start with one line that says what to do."""
    with pytest.raises(AssertionError, match="the launcher ended with 2"):
        start_cell(*flags)
    log = (tmp_path / "cell-0" / "cell.log").read_text()
    assert log.count(message) == 1
    assert "Traceback" not in log
