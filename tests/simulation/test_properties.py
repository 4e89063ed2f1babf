"""Whatever happens in a cell of tiny pools, these hold: no over-commit, none lost or doubled, order, progress."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc import decisions as d
from scheduler_svc.policy.scheduler import PolicyConfig
from scheduler_svc.policy.state import entry_key, rank_of
from scheduler_svc.simulated_worker import SimulatedWorker
from scheduler_svc.simulator import CostModel, SimulatedRequest, SimulatedWorkerSpec, Simulation
from shared.bus import RequestState
from shared.capacity import blocks_for, fits
from shared.ids import RequestId
from shared.messages import HeldRequest
from tests.simulation.traces import TRACES, UNTIL_S, costs, requests, run_out, worker_specs

MAX_PREEMPTIONS = 3


@dataclass
class Watcher:
    """Checks every batch of decisions from what was reported and sent alone, without the policy's own bookkeeping."""

    last: dict[str, d.Reported] = field(default_factory=dict)
    sent: dict[RequestId, d.DispatchDone] = field(default_factory=dict)
    num_preempted: dict[RequestId, int] = field(default_factory=dict)

    def __call__(self, cell: Simulation, event: d.Event, decisions: list[d.Decision]) -> None:
        for worker in cell.cell.workers.values():
            assert_sound(worker)
        if isinstance(event, d.Reported):
            self.last[event.report.worker_id] = event
        elif isinstance(event, d.DispatchDone):
            self.sent[event.request_id] = event
        for decision in decisions:
            if isinstance(decision, d.Dispatch):
                self._check_dispatch(cell, decision)
            elif isinstance(decision, d.Preempt):
                self._check_preempt(decision)

    def _check_dispatch(self, cell: Simulation, dispatch: d.Dispatch) -> None:
        """Free blocks as reported, and all of those whose requests may be ending, cover what is under way."""
        report = self.last[dispatch.worker_id].report
        applied = entry_key(report.last_inbox_id)
        ids = {dispatch.request_id}
        for request_id, done in self.sent.items():
            is_owner = cell.cell.is_owner(dispatch.worker_id, request_id, done.attempt)
            if is_owner and entry_key(done.entry_id) > applied:
                ids.add(request_id)
        needed = sum(_least_blocks(cell, request_id, report.num_blocks) for request_id in ids)
        needed += sum(_blocks_to_come_back(cell, held, dispatch) for held in report.held)
        ending = sum(h.num_blocks for h in report.held if _may_end_soon(cell, h.request_id, h.num_tokens))
        assert needed <= report.free_blocks + ending, f"{dispatch} needs {needed} of {report.free_blocks}+{ending}"

    def _check_preempt(self, preempt: d.Preempt) -> None:
        report = self.last[preempt.worker_id].report
        assert len(report.held) > 1, "the only request of a worker is never preempted"
        self.num_preempted[preempt.request_id] = self.num_preempted.get(preempt.request_id, 0) + 1


def _least_blocks(cell: Simulation, request_id: RequestId, num_blocks: int) -> int:
    record = cell.cell.records[request_id]
    known = [record.summary.prompt_len(c) + s.num_tokens for c, s in enumerate(record.choices) if s.is_open]
    num_shared = (len(known) - 1) * ((record.summary.prompt_lens[0] - 1) // 8)
    return min(num_blocks, sum(blocks_for(k, 8) for k in known) - num_shared)


def _blocks_to_come_back(cell: Simulation, held: HeldRequest, dispatch: d.Dispatch) -> int:
    """Blocks that an older one of one choice needs which waits with its own in host memory."""
    record = cell.cell.records[held.request_id]
    is_owner = cell.cell.is_owner(dispatch.worker_id, held.request_id, held.attempt)
    if held.num_running or not held.num_swapped_blocks or not is_owner or rank_of(record.order) > dispatch.rank:
        return 0
    return blocks_for(held.num_tokens, 8) if held.num_waiting == 1 else 0


def _may_end_soon(cell: Simulation, request_id: RequestId, num_tokens: int) -> bool:
    summary = cell.cell.records[request_id].summary
    return num_tokens + 2 * summary.n > summary.prompt_lens[0] + summary.max_tokens


def assert_sound(worker: SimulatedWorker) -> None:
    """Blocks are free or a running one's, those of host memory free or a waiting one's, each once."""
    own = sum(s.num_blocks - s.num_shared - len(s.prefix) for s in worker.running)
    in_prefixes = 0 if worker.cache is None else worker.cache.num_used
    assert worker.free_blocks + own + in_prefixes == worker.hello.num_blocks
    assert worker.cache is None or 0 <= worker.cache.num_unused <= worker.free_blocks
    assert worker.free_swap_blocks + sum(s.num_swapped for s in worker.waiting) == worker.hello.num_swap_blocks
    assert min(worker.free_blocks, worker.free_swap_blocks) >= 0
    assert not any(s.num_blocks for s in worker.waiting)
    assert not any(s.num_swapped for s in worker.running)
    owners = [s.request_id for s in worker.running if not s.num_shared]
    assert {s.request_id for s in worker.running if s.num_shared} <= set(owners), "shared with nobody"


def assert_idle(cell: Simulation) -> None:
    """Nothing is live, queued, running or held; every live worker is as free as at its start."""
    assert set() == cell.cell.live
    assert set() == cell.policy.request_ids
    assert (cell.policy.num_queued, cell.policy.num_running) == (0, 0)
    for worker in cell.cell.workers.values():
        assert_sound(worker)
        assert not worker.is_alive or worker.free_blocks == worker.hello.num_blocks
        assert not worker.is_alive or worker.free_swap_blocks == worker.hello.num_swap_blocks


def holds_blocks(arrivals: list[SimulatedRequest], workers: list[SimulatedWorkerSpec], cost: CostModel) -> None:
    """All finish once with their tokens, within bounds of blocks and preemptions, and leave nothing behind."""
    watcher = Watcher()
    config = PolicyConfig(max_preemptions=MAX_PREEMPTIONS)
    cell = Simulation(arrivals, workers, cost=cost, config=config, on_decisions=watcher)
    result = run_out(cell, len(arrivals))
    assert {RequestId(f"r{i}"): "finished" for i in range(len(arrivals))} == result.ended
    for index, request in enumerate(arrivals):
        record = cell.cell.records[RequestId(f"r{index}")]
        assert [request.output_len] * request.n == [choice.num_tokens for choice in record.choices]
        assert record.preemptions <= MAX_PREEMPTIONS
    assert max(watcher.num_preempted.values(), default=0) <= MAX_PREEMPTIONS + result.num_evictions
    assert_idle(cell)


@TRACES
@given(requests(), st.lists(worker_specs(15), min_size=1, max_size=3), costs)
def test_all_finish_with_their_tokens_while_workers_live(
    arrivals: list[SimulatedRequest], workers: list[SimulatedWorkerSpec], cost: CostModel
) -> None:
    """Every request that fits should finish once with all of its tokens, be preempted at most as often as allowed, and
    leave nothing behind; no dispatch should go beyond what was reported free."""
    holds_blocks(arrivals, workers, cost)


def holds_refusals(arrivals: list[SimulatedRequest], workers: list[SimulatedWorkerSpec]) -> None:
    """Only what no worker could hold is rejected, and all others finish."""
    result = run_out(Simulation(arrivals, workers), len(arrivals))
    largest = max(w.num_blocks for w in workers)
    for index, request in enumerate(arrivals):
        does_fit = fits(request.prompt_len + request.max_tokens, block_size=8, num_blocks=largest)
        reason = result.ended[RequestId(f"r{index}")]
        assert reason == "finished" or (reason == "rejected" and (not does_fit or _was_rejected_early(workers)))


@TRACES
@given(requests(max_prompt=150), st.lists(worker_specs(4), min_size=1, max_size=2))
def test_what_never_fits_is_rejected_and_the_rest_finishes(
    arrivals: list[SimulatedRequest], workers: list[SimulatedWorkerSpec]
) -> None:
    """A request should be rejected only if no worker could hold it, and never keep the others waiting for ever."""
    holds_refusals(arrivals, workers)


def _was_rejected_early(workers: list[SimulatedWorkerSpec]) -> bool:
    """The larger worker came later than the smaller one: only live ones count."""
    return len({w.num_blocks for w in workers}) > 1


@TRACES
@given(requests(can_cancel=True), st.lists(worker_specs(15), min_size=1, max_size=2), costs)
def test_a_cancel_at_any_time_frees_everything(
    arrivals: list[SimulatedRequest], workers: list[SimulatedWorkerSpec], cost: CostModel
) -> None:
    """Each request should end exactly once, as finished or cancelled, and the cell be empty afterwards."""
    cell = Simulation(arrivals, workers, cost=cost)
    result = run_out(cell, len(arrivals))
    assert len(arrivals) == len(result.ended)
    for index, request in enumerate(arrivals):
        allowed = {"finished"} if request.cancel_s is None else {"finished", "cancelled"}
        assert result.ended[RequestId(f"r{index}")] in allowed
    assert_idle(cell)


@TRACES
@given(requests(), st.lists(st.floats(0.5, 8), min_size=1, max_size=3), st.lists(st.floats(0.2, 12), max_size=3), costs)
def test_nothing_is_lost_when_workers_die_and_leaders_change(
    arrivals: list[SimulatedRequest], deaths_s: list[float], changes_s: list[float], cost: CostModel
) -> None:
    """With one worker that lives, each request should still finish once with all of its tokens."""
    steady = SimulatedWorkerSpec(num_blocks=15, block_size=8)
    mortal = [replace(steady, start_s=death_s / 2, death_s=death_s) for death_s in deaths_s]
    cell = Simulation(
        arrivals,
        [steady, *mortal],
        cost=cost,
        config=PolicyConfig(max_crashes=len(mortal) + 1),
        leader_changes_s=tuple(changes_s),
    )
    result = run_out(cell, len(arrivals))
    assert {RequestId(f"r{i}"): "finished" for i in range(len(arrivals))} == result.ended
    for index, request in enumerate(arrivals):
        choices = cell.cell.records[RequestId(f"r{index}")].choices
        assert [request.output_len] * request.n == [choice.num_tokens for choice in choices]
    assert_idle(cell)


@TRACES
@given(requests(), worker_specs(15), costs)
def test_first_admissions_follow_arrival(
    arrivals: list[SimulatedRequest], worker: SimulatedWorkerSpec, cost: CostModel
) -> None:
    """Among equals, a request should never be admitted for the first time before one that came earlier."""
    cell = Simulation(arrivals, [worker], cost=cost)
    result = run_out(cell, len(arrivals))
    first = list(dict.fromkeys(request_id for request_id, _ in result.dispatched))
    assert sorted(first, key=lambda request_id: cell.cell.records[request_id].order) == first


@pytest.mark.case(77)
@settings(TRACES, max_examples=10)
@given(st.data())
def test_after_500_random_events_the_next_request_is_admitted_at_once(data: st.DataObject) -> None:
    """Admits, cancels, finishes and preemptions at random should leave all blocks free and the accounts at nought."""
    random = data.draw(st.randoms(use_true_random=False))
    arrivals = [
        SimulatedRequest(
            arrival_s=random.uniform(0, 20),
            prompt_len=random.randint(1, 60),
            max_tokens=60,
            output_len=random.randint(1, 60),
            cancel_s=random.choice([None, random.uniform(0, 30)]),
        )
        for _ in range(150)
    ]
    arrivals.append(SimulatedRequest(arrival_s=UNTIL_S, prompt_len=60, max_tokens=60, output_len=60))
    cell = Simulation(arrivals, [SimulatedWorkerSpec(num_blocks=15, block_size=8)])
    before = cell.run(UNTIL_S - 1)
    assert len(before.ended) == 150
    assert_idle(cell)
    num_dispatched = len(before.dispatched)
    after = cell.run(UNTIL_S)
    assert num_dispatched + 1 == len(after.dispatched)
    assert RequestState.RUNNING is cell.cell.records[RequestId("r150")].state


def holds_claims(gap_s: float) -> None:
    """Small ones that never cease to come are not placed on blocks that older ones in host memory need."""
    slow = [SimulatedRequest(arrival_s=i * 0.05, prompt_len=8, max_tokens=100, output_len=100) for i in range(8)]
    small = [SimulatedRequest(arrival_s=1 + i * gap_s, prompt_len=4, max_tokens=4, output_len=4) for i in range(60)]
    worker = SimulatedWorkerSpec(num_blocks=40, block_size=8, max_num_seqs=16, num_swap_blocks=200)
    cell = Simulation(slow + small, [worker], on_decisions=Watcher())
    assert ["finished"] * 68 == list(run_out(cell, 68).ended.values())
    assert cell.result.num_swapped_out > 0, "too easy to tell"
    assert_idle(cell)


@settings(TRACES, max_examples=max(5, TRACES.max_examples // 10))
@given(st.floats(0.02, 0.1))
def test_the_claim_of_one_in_host_memory_is_kept(gap_s: float) -> None:
    """Nobody of worse standing should be placed on what it needs to come back."""
    holds_claims(gap_s)


def holds_bounds(gap_s: float) -> None:
    """Under a stream too fast for the pool, each request is preempted once at most when that is the bound."""
    arrivals = [SimulatedRequest(arrival_s=i * gap_s, prompt_len=8, max_tokens=100, output_len=100) for i in range(40)]
    worker = SimulatedWorkerSpec(num_blocks=40, block_size=8, max_num_seqs=16)
    cell = Simulation(arrivals, [worker], config=PolicyConfig(max_preemptions=1))
    assert ["finished"] * 40 == list(run_out(cell, 40).ended.values())
    assert all(record.preemptions <= 1 for record in cell.cell.records.values())


@settings(TRACES, max_examples=max(5, TRACES.max_examples // 10))
@given(st.floats(0.02, 0.1))
def test_nobody_is_preempted_more_often_than_allowed(gap_s: float) -> None:
    """However fast requests come, the bound should hold and everybody finish."""
    holds_bounds(gap_s)


@pytest.mark.case(75)
def test_under_a_steady_stream_no_request_starves() -> None:
    """With arrivals that keep coming and a pool too small for them, each request should finish within its bound of
    preemptions, and preemptions should really have happened."""
    arrivals = [SimulatedRequest(arrival_s=i * 0.05, prompt_len=8, max_tokens=100, output_len=100) for i in range(100)]
    config = PolicyConfig(max_preemptions=MAX_PREEMPTIONS)
    cell = Simulation(arrivals, [SimulatedWorkerSpec(num_blocks=40, block_size=8, max_num_seqs=16)], config=config)
    result = cell.run(UNTIL_S)
    assert list(result.ended.values()) == ["finished"] * 100
    assert len(result.preempted) >= 20
    assert all(record.preemptions <= MAX_PREEMPTIONS for record in cell.cell.records.values())


def test_choices_share_the_blocks_of_their_prompt() -> None:
    """Three choices should run at once where the prompt fits once only, and compute it once: the first token of all is
    there when the one that computes it has it, and the others have computed what is their own."""
    arrivals = [SimulatedRequest(arrival_s=0.1, prompt_len=64, max_tokens=8, output_len=8, n=3)]
    worker = SimulatedWorkerSpec(num_blocks=16, block_size=8, max_num_batched_tokens=16)
    num_running = []

    def note(cell: Simulation, event: d.Event, decisions: list[d.Decision]) -> None:
        for one in cell.cell.workers.values():
            assert_sound(one)
            num_running.append(len(one.running))

    cell = Simulation(arrivals, [worker], on_decisions=note)
    result = cell.run(UNTIL_S)
    assert (max(num_running), result.num_evictions) == (3, 0)
    assert {RequestId("r0"): "finished"} == result.ended
    # 4 steps for 64 tokens by 16 at a time, 1 for the last 8 of each of the two others, and 7 more tokens
    assert result.num_steps <= 4 + 2 + 7
    assert_idle(cell)


def test_equal_traces_give_equal_results() -> None:
    """The simulation, and so the policy, should depend on nothing but its inputs."""
    arrivals = [
        SimulatedRequest(arrival_s=i / 7, prompt_len=i % 50 + 1, max_tokens=40, output_len=40) for i in range(60)
    ]
    workers = [SimulatedWorkerSpec(num_blocks=12), SimulatedWorkerSpec(num_blocks=9, death_s=2.0)]
    assert Simulation(arrivals, workers).run(UNTIL_S) == Simulation(arrivals, workers).run(UNTIL_S)
