"""Who gives way before a worker's blocks run out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc import decisions as d
from scheduler_svc.policy import forecast, listing
from scheduler_svc.policy.scheduler import PolicyConfig
from scheduler_svc.policy.state import Request, Worker
from shared.bus import ChoiceState
from shared.ids import WorkerId
from shared.messages import HeldRequest, WorkerReport
from tests.scheduler_svc.cell import PolicyCell, dispatched, held, make_hello, make_record, running


def preempted(decisions: list[d.Decision]) -> list[str]:
    return [x.request_id for x in decisions if isinstance(x, d.Preempt)]


def cell_with(*names: str, config: PolicyConfig | None = None, **changes: Any) -> PolicyCell:
    """One worker `w` that runs `names`, oldest first, each with a long way to go."""
    cell = PolicyCell(config or PolicyConfig())
    cell.see_workers(make_hello("w"))
    records = [make_record(name, order, max_tokens=200, **changes) for order, name in enumerate(names)]
    cell.observe(*(running(record, "w") for record in records))
    return cell


def full(*names: str, tokens: int = 80) -> tuple[HeldRequest, ...]:
    """Each with `tokens` tokens in exactly filled blocks."""
    return tuple(held(name, blocks=tokens // 16, tokens=tokens) for name in names)


def test_the_youngest_gives_way_before_the_wall() -> None:
    """With three sequences about to need a block each and one left, the last that came should go."""
    cell = cell_with("old", "middle", "young")
    decisions = cell.report("w", free=1, held=full("old", "middle", "young"))
    assert preempted(decisions) == ["young"]
    (preempt,) = [x for x in decisions if isinstance(x, d.Preempt)]
    assert (preempt.attempt, preempt.report_seq) == (1, 1)


def test_nobody_gives_way_while_blocks_last() -> None:
    """A block for each within the horizon should be enough."""
    assert preempted(cell_with("a", "b", "c").report("w", free=3, held=full("a", "b", "c"))) == []


def test_room_in_the_last_block_is_seen() -> None:
    """Sequences that do not reach a new block within the horizon should not be in the forecast."""
    cell = cell_with("a", "b", "c")
    roomy = tuple(held(name, blocks=5, tokens=70) for name in "abc")
    assert preempted(cell.report("w", free=0, held=roomy)) == []


def test_a_natural_end_in_time_saves_the_youngest() -> None:
    """When the oldest ends before the others need its blocks, nobody should be preempted."""
    cell = cell_with("b", "c")
    cell.observe(running(make_record("a", -1, prompt_len=16, max_tokens=16), "w"))
    almost = (held("a", blocks=2, tokens=31), held("b", blocks=5, tokens=79), held("c", blocks=5, tokens=79))
    assert preempted(cell.report("w", free=0, held=almost)) == []


def test_the_only_one_is_never_preempted() -> None:
    """A worker's oldest request should stay, whatever the forecast says."""
    assert preempted(cell_with("a").report("w", free=0, held=full("a"))) == []


@pytest.mark.case(75)
def test_a_request_is_preempted_a_bounded_number_of_times() -> None:
    """At its bound a request should stay, and the next younger one that may go should go instead."""
    cell = cell_with("old", "middle", config=PolicyConfig(max_preemptions=2))
    cell.observe(running(make_record("young", 9, max_tokens=200, preemptions=2), "w"))
    assert preempted(cell.report("w", free=1, held=full("old", "middle", "young"))) == ["middle"]


def test_one_preemption_is_not_decided_twice() -> None:
    """Until the worker has read it, its blocks should count as coming, and nobody else go for the same need."""
    cell = cell_with("old", "middle", "young")
    assert preempted(cell.report("w", free=1, held=full("old", "middle", "young"))) == ["young"]
    assert preempted(cell.report("w", free=1, held=full("old", "middle", "young"))) == []


def test_a_void_preemption_is_decided_again() -> None:
    """When the worker has read it and still holds the request, the need should be looked at afresh."""
    cell = cell_with("old", "middle", "young")
    cell.report("w", free=1, held=full("old", "middle", "young"))
    still = full("old", "middle", "young")
    cell.report("w", free=3, applied=cell.last_entry, held=still)
    assert preempted(cell.report("w", free=1, applied=cell.last_entry, held=still)) == ["young"]


def test_a_preempted_request_comes_back_at_its_place_only_when_there_is_room() -> None:
    """It should not bounce: the blocks it gave stay for those it gave them to."""
    cell = cell_with("old", "middle", "young")
    cell.report("w", free=1, held=full("old", "middle", "young"))
    decisions = cell.report("w", free=6, applied=cell.last_entry, held=full("old", "middle"))
    assert [d.Recheck(request_ids=(make_record("young").summary.request_id,))] == decisions
    logged = (ChoiceState(num_entries=64),)
    back = make_record("young", 2, max_tokens=200, attempt=1, preemptions=1, choices=logged)
    assert dispatched(cell.observe(back, make_record("later", 3))) == []
    decisions = cell.feed(d.Ended(request_ids=(make_record("middle").summary.request_id,)))
    decisions += cell.report("w", free=11, applied=cell.last_entry, held=full("old"))
    assert [name for name, _ in dispatched(decisions)] == ["young", "later"]


def test_the_horizon_follows_the_report_interval() -> None:
    """A worker that makes many steps between reports should be looked at further ahead."""
    cell = cell_with("a", "b")
    roomy = (held("a", blocks=5, tokens=70), held("b", blocks=5, tokens=70))
    cell.report("w", free=0, held=roomy, num_steps=1)
    assert preempted(cell.report("w", free=0, held=roomy, num_steps=9)) == ["b"]


@given(
    st.lists(st.tuples(*(st.integers(0, most) for most in (60, 3, 2))), max_size=5),
    st.integers(0, 30),
    st.integers(0, 20),
    st.sampled_from([0, 24]),
)
def test_the_sums_never_overlook_growth(rows: list[tuple[int, int, int]], free: int, steps: int, window: int) -> None:
    """Where the sums of a report say that nothing runs out, growth counted one by one should fit at the horizon."""
    worker = Worker(make_hello("w", num_blocks=40, block_size=4, window=window, step_tokens=8 if window else 0))
    lists = []
    for number, (tokens, num_running, num_waiting) in enumerate(rows):
        worker.assign(Request(make_record(f"r{number}").summary, (number, 0), now=0.0))
        one = held(f"r{number}", blocks=0, tokens=tokens, attempt=0, seqs=num_running)
        lists.append(replace(one, num_waiting=num_waiting))
    for seq, num_steps in ((1, 0), (2, steps)):
        report = WorkerReport(worker_id=WorkerId("w"), seq=seq, last_inbox_id="", free_blocks=free, num_blocks=40,
                              num_steps=num_steps, held=tuple(lists))  # fmt: skip
        assert worker.take(report)
        assert not listing.read(worker, 0.0, lease_s=3.0).decisions
    if forecast.fits_again(worker):
        assert sum(forecast.blocks_in(worker, one, worker.horizon) for one in lists) <= free


def waiting(name: str) -> HeldRequest:
    """Held by a worker that lets it wait."""
    return replace(held(name, blocks=0, tokens=16), num_running=0, num_waiting=1)


def two_full_workers() -> PolicyCell:
    """Workers of one slot each that run `a` and `b`; `c` has been sent ahead to the first."""
    cell = PolicyCell()
    cell.join("w1", "w2", max_num_seqs=1)
    assert dispatched(cell.observe(make_record("a", 1), make_record("b", 2))) == [("a", "w1"), ("b", "w2")]
    assert dispatched(cell.observe(make_record("c", 3))) == [("c", "w1")]
    return cell


def test_a_request_sent_ahead_is_taken_back_when_another_worker_is_free_first() -> None:
    """It should not wait behind one worker's long run while the other idles, and be moved only once."""
    cell = two_full_workers()
    report = {"free": 14, "applied": "9-9", "held": (held("a", blocks=2, tokens=18), waiting("c"))}
    assert [preempted(cell.report("w1", num_steps=steps, **report)) for steps in (1, 2, 3)] == [[], [], []]
    cell.feed(d.Ended(request_ids=(make_record("b").summary.request_id,)))
    cell.report("w2", applied="9-9")
    assert preempted(cell.report("w1", num_steps=4, **report)) == ["c"]
    assert preempted(cell.report("w1", num_steps=5, **report | {"applied": "0-0"})) == []
    assert dispatched(cell.observe(make_record("c", 3, attempt=1, preemptions=1))) == [("c", "w2")]


def test_a_request_that_has_just_arrived_is_left_where_it_is() -> None:
    """A worker that has not had two steps to let it in should keep it."""
    cell = two_full_workers()
    cell.feed(d.Ended(request_ids=(make_record("b").summary.request_id,)))
    cell.report("w2", applied="9-9")
    just = {"free": 14, "applied": "9-9", "held": (held("a", blocks=2, tokens=18), waiting("c"))}
    assert preempted(cell.report("w1", num_steps=5, **just)) == []
    assert preempted(cell.report("w1", num_steps=6, **just)) == []
    assert preempted(cell.report("w1", num_steps=7, **just)) == ["c"]


def test_a_prompt_that_waits_for_its_share_of_a_step_is_left_where_it_is() -> None:
    """With a slot and blocks free at its own worker, moving it would only start it later."""
    cell = PolicyCell()
    cell.see_workers(make_hello("w1"), make_hello("w2"))
    cell.observe(running(make_record("a", 1), "w1"), running(make_record("c", 2), "w1"))
    cell.report("w2")
    lists = (held("a", blocks=2, tokens=18), waiting("c"))
    for steps in range(1, 9):
        assert preempted(cell.report("w1", free=14, num_steps=steps, held=lists)) == []
    assert preempted(cell.report("w1", free=0, num_steps=9, held=lists)) == ["c"], "no blocks: now it is worth it"


def test_a_request_is_not_moved_to_a_worker_where_somebody_waits() -> None:
    """The other worker's own waiting requests come first, so requests should never change places in a circle."""
    cell = PolicyCell()
    cell.see_workers(make_hello("w1", max_num_seqs=1), make_hello("w2"))
    cell.observe(running(make_record("a", 1), "w1"), running(make_record("c", 2), "w1"))
    cell.observe(running(make_record("d", 3), "w2"))
    cell.report("w2", free=16, held=(waiting("d"),))
    lists = (held("a", blocks=2, tokens=18), waiting("c"))
    for steps in range(1, 9):
        assert preempted(cell.report("w1", free=14, num_steps=steps, held=lists)) == []
    cell.report("w2", free=14, held=(held("d", blocks=2, tokens=18),))
    assert preempted(cell.report("w1", free=14, num_steps=9, held=lists)) == ["c"], "d runs: now it may"
