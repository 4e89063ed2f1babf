"""What `/metrics` says of the cell while workers come and go."""

from __future__ import annotations

from gateway.cell import FORGET_AFTER_LEASES, CellTotals, CellView
from shared.clock import ManualClock
from shared.ids import WorkerId
from shared.memory_bus import MemoryBus
from shared.messages import WorkerReport

LEASE_S = 3.0


def make_report(num_tokens: int) -> WorkerReport:
    return WorkerReport(
        worker_id=WorkerId("w:1"), seq=1, last_inbox_id="0-0", free_blocks=6, num_blocks=16, num_steps=1, num_running=2,
        num_generation_tokens=num_tokens,
    )  # fmt: skip


async def test_a_silent_workers_gauges_go_and_its_counters_count_once() -> None:
    """A worker that was silent for a while and comes back should never be in a total twice, nor fall out of it."""
    clock, bus = ManualClock(), MemoryBus()
    view = CellView(bus, clock, LEASE_S)

    async def totals() -> CellTotals:
        await view.read()
        return await view.totals()

    view.note(make_report(100))
    assert ((await totals()).num_running, (await totals()).num_generation_tokens) == (2, 100)
    clock.advance(LEASE_S)
    assert ((await totals()).num_workers, (await totals()).num_generation_tokens) == (0, 100)
    view.note(make_report(130))
    assert ((await totals()).num_workers, (await totals()).num_generation_tokens) == (1, 130)
    clock.advance(FORGET_AFTER_LEASES * LEASE_S)
    assert ((await totals()).num_workers, (await totals()).num_generation_tokens) == (0, 130)
