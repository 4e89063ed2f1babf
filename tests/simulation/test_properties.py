"""Whatever happens in a cell of tiny pools, these hold: no over-commit, none lost or doubled, order, progress."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler_svc import decisions as d
from scheduler_svc.policy.scheduler import PolicyConfig
from scheduler_svc.policy.state import entry_key
from scheduler_svc.simulator import CostModel, SimulatedRequest, SimulatedWorkerSpec, Simulation
from shared.bus import RequestState
from shared.capacity import blocks_for, fits
from shared.ids import RequestId

UNTIL_S = 600.0
MAX_PREEMPTIONS = 3
TRACES = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def requests(draw: st.DrawFn, *, can_cancel: bool = False, max_prompt: int = 60) -> list[SimulatedRequest]:
    """Up to 25 requests within 3 seconds."""
    found = []
    for _ in range(draw(st.integers(1, 25))):
        arrival_s = draw(st.floats(0, 3))
        max_tokens = draw(st.integers(1, 60))
        cancel_s = draw(st.none() | st.floats(0, 6)) if can_cancel else None
        found.append(
            SimulatedRequest(
                arrival_s=arrival_s,
                prompt_len=draw(st.integers(1, max_prompt)),
                max_tokens=max_tokens,
                output_len=draw(st.integers(1, max_tokens)),
                n=draw(st.sampled_from([1, 1, 1, 2, 3])),
                cancel_s=None if cancel_s is None else arrival_s + cancel_s,
            )
        )
    return found


def worker_specs(min_blocks: int) -> st.SearchStrategy[SimulatedWorkerSpec]:
    """Tiny pools; none dies."""
    return st.builds(
        SimulatedWorkerSpec,
        num_blocks=st.integers(min_blocks, min_blocks + 12),
        block_size=st.just(8),
        max_num_seqs=st.integers(1, 6),
        start_s=st.floats(0, 2),
    )


costs = st.builds(
    CostModel,
    step_s=st.floats(0.005, 0.1),
    token_s=st.floats(0, 0.005),
    report_delay_s=st.floats(0.001, 0.3),
    inbox_delay_s=st.floats(0.001, 0.3),
)


@dataclass
class Watcher:
    """Checks every batch of decisions from what was reported and sent alone, without the policy's own bookkeeping."""

    last: dict[str, d.Reported] = field(default_factory=dict)
    sent: dict[RequestId, d.DispatchDone] = field(default_factory=dict)
    num_preempted: dict[RequestId, int] = field(default_factory=dict)

    def __call__(self, cell: Simulation, event: d.Event, decisions: list[d.Decision]) -> None:
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
        ending = sum(h.num_blocks for h in report.held if _may_end_soon(cell, h.request_id, h.num_tokens))
        assert needed <= report.free_blocks + ending, f"{dispatch} needs {needed} of {report.free_blocks}+{ending}"

    def _check_preempt(self, preempt: d.Preempt) -> None:
        report = self.last[preempt.worker_id].report
        assert len(report.held) > 1, "the only request of a worker is never preempted"
        self.num_preempted[preempt.request_id] = self.num_preempted.get(preempt.request_id, 0) + 1


def _least_blocks(cell: Simulation, request_id: RequestId, num_blocks: int) -> int:
    record = cell.cell.records[request_id]
    known = [record.summary.prompt_len(c) + s.num_tokens for c, s in enumerate(record.choices) if s.is_open]
    return min(num_blocks, sum(blocks_for(k, 8) for k in known))


def _may_end_soon(cell: Simulation, request_id: RequestId, num_tokens: int) -> bool:
    summary = cell.cell.records[request_id].summary
    return num_tokens + 2 * summary.n > summary.prompt_lens[0] + summary.max_tokens


def assert_idle(cell: Simulation) -> None:
    """Nothing is live, queued, running or held; every live worker is as free as at its start."""
    assert set() == cell.cell.live
    assert set() == cell.policy.request_ids
    assert (cell.policy.num_queued, cell.policy.num_running) == (0, 0)
    for worker in cell.cell.workers.values():
        assert not worker.is_alive or worker.free_blocks == worker.hello.num_blocks


@TRACES
@given(requests(), st.lists(worker_specs(15), min_size=1, max_size=3), costs)
def test_all_finish_with_their_tokens_while_workers_live(
    arrivals: list[SimulatedRequest], workers: list[SimulatedWorkerSpec], cost: CostModel
) -> None:
    """Every request that fits should finish once with all of its tokens, be preempted at most as often as allowed, and
    leave nothing behind; no dispatch should go beyond what was reported free."""
    watcher = Watcher()
    config = PolicyConfig(max_preemptions=MAX_PREEMPTIONS)
    cell = Simulation(arrivals, workers, cost=cost, config=config, on_decisions=watcher)
    result = cell.run(UNTIL_S)
    assert {RequestId(f"r{i}"): "finished" for i in range(len(arrivals))} == result.ended
    for index, request in enumerate(arrivals):
        record = cell.cell.records[RequestId(f"r{index}")]
        assert [request.output_len] * request.n == [choice.num_tokens for choice in record.choices]
        assert record.preemptions <= MAX_PREEMPTIONS
    assert max(watcher.num_preempted.values(), default=0) <= MAX_PREEMPTIONS + result.num_evictions
    assert_idle(cell)


@TRACES
@given(requests(max_prompt=150), st.lists(worker_specs(4), min_size=1, max_size=2))
def test_what_never_fits_is_rejected_and_the_rest_finishes(
    arrivals: list[SimulatedRequest], workers: list[SimulatedWorkerSpec]
) -> None:
    """A request should be rejected only if no worker could hold it, and never keep the others waiting for ever."""
    result = Simulation(arrivals, workers).run(UNTIL_S)
    largest = max(w.num_blocks for w in workers)
    for index, request in enumerate(arrivals):
        does_fit = fits(request.prompt_len + request.max_tokens, block_size=8, num_blocks=largest)
        reason = result.ended[RequestId(f"r{index}")]
        assert reason == "finished" or (reason == "rejected" and (not does_fit or _was_rejected_early(workers)))


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
    result = cell.run(UNTIL_S)
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
    result = cell.run(UNTIL_S)
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
    result = cell.run(UNTIL_S)
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


def test_equal_traces_give_equal_results() -> None:
    """The simulation, and so the policy, should depend on nothing but its inputs."""
    arrivals = [
        SimulatedRequest(arrival_s=i / 7, prompt_len=i % 50 + 1, max_tokens=40, output_len=40) for i in range(60)
    ]
    workers = [SimulatedWorkerSpec(num_blocks=12), SimulatedWorkerSpec(num_blocks=9, death_s=2.0)]
    assert Simulation(arrivals, workers).run(UNTIL_S) == Simulation(arrivals, workers).run(UNTIL_S)
