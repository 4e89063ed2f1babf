"""What `/metrics` says of the cell while workers come and go."""

from __future__ import annotations

from dataclasses import replace

from gateway.cell import FORGET_AFTER_LEASES, CellTotals, CellView
from gateway.metrics import GatewayMetrics
from shared.clock import ManualClock
from shared.ids import RequestId, WorkerId
from shared.memory_bus import MemoryBus
from shared.messages import HeldRequest, WorkerReport

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


async def test_host_memory_should_be_shown_in_full() -> None:
    """Requests with blocks there, its share in use, blocks copied by direction and preemptions by way should be those
    of the reports."""
    view = CellView(MemoryBus(), ManualClock(), LEASE_S)
    held = [
        HeldRequest(request_id=RequestId(f"r{i}"), attempt=1, num_blocks=0, num_tokens=9, num_running=0, num_waiting=1,
                    num_swapped_blocks=i)
        for i in range(3)
    ]  # fmt: skip
    report = replace(make_report(1), held=tuple(held), free_swap_blocks=9, num_swapped_out=7, num_swapped_in=4,
                     num_preemptions=5, num_swap_preemptions=2)  # fmt: skip
    view.note(report)
    text = GatewayMetrics("m").render_cell(await view.totals()).decode()
    for line in (
        'vllm:num_requests_swapped{model_name="m"} 2.0', 'vllm:cpu_cache_usage_perc{model_name="m"} 0.25',
        'quire:swapped_blocks_total{direction="out",model_name="m"} 7.0',
        'quire:swapped_blocks_total{direction="in",model_name="m"} 4.0',
        'quire:preemptions_total{model_name="m",way="swap"} 2.0',
        'quire:preemptions_total{model_name="m",way="recompute"} 3.0', 'vllm:num_preemptions_total{model_name="m"} 5.0',
    ):  # fmt: skip
        assert line in text
