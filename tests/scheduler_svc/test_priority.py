"""Classes: who goes first, who gives way to whom, and that equals leave each other alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc import decisions as d
from scheduler_svc.policy.scheduler import PolicyConfig
from shared.messages import HeldRequest
from tests.scheduler_svc.cell import PolicyCell, dispatched, held, make_hello, make_record, running


def preempted(decisions: list[d.Decision]) -> list[str]:
    return [x.request_id for x in decisions if isinstance(x, d.Preempt)]


def listed(*names: str, blocks: int = 2, tokens: int = 20) -> tuple[HeldRequest, ...]:
    return tuple(held(name, blocks=blocks, tokens=tokens) for name in names)


def busy_cell(*priorities: int, config: PolicyConfig | None = None, **changes: Any) -> PolicyCell:
    """A worker `w` with exactly as many slots as it runs requests `r0`, `r1`, ... of these priorities."""
    cell = PolicyCell(config or PolicyConfig())
    cell.see_workers(make_hello("w", max_num_seqs=len(priorities), num_blocks=64))
    names = [f"r{i}" for i in range(len(priorities))]
    records = [
        make_record(name, order, max_tokens=200, priority=priority, **changes)
        for order, (name, priority) in enumerate(zip(names, priorities, strict=True))
    ]
    cell.observe(*(running(record, "w") for record in records))
    cell.report("w", free=64 - 2 * len(names), num_blocks=64, held=listed(*names))
    return cell


def test_a_better_class_is_dispatched_first_and_tells_the_worker() -> None:
    """Lower numbers should go first, whatever came first; inside a class arrival counts."""
    cell = PolicyCell()
    cell.observe(make_record("late", 1, priority=3), make_record("b", 3, priority=-2), make_record("a", 2, priority=-2))
    decisions = cell.join("w")
    assert dispatched(decisions) == [("a", "w"), ("b", "w"), ("late", "w")]
    assert [x.priority for x in decisions if isinstance(x, d.Dispatch)] == [-2, -2, 3]


@pytest.mark.case(74)
def test_an_urgent_request_takes_the_slot_of_the_least_urgent_at_once() -> None:
    """With blocks to spare and all slots taken, the youngest of the lowest class should give way in the same moment."""
    cell = busy_cell(5, 9, 9, 1)
    decisions = cell.observe(make_record("urgent", 9, priority=1))
    assert [type(x) for x in decisions] == [d.Preempt, d.Dispatch]
    assert preempted(decisions) == ["r2"]
    assert dispatched(decisions) == [("urgent", "w")]


@pytest.mark.case(74)
def test_equals_never_take_each_others_slot() -> None:
    """A request of the same class should be sent ahead of a slot at most."""
    cell = busy_cell(1, 1)
    assert preempted(cell.observe(make_record("a", 8, priority=1), make_record("b", 9, priority=1))) == []
    assert preempted(cell.report("w", free=60, num_blocks=64, held=listed("r0", "r1"))) == []


def test_each_urgent_request_takes_one_slot() -> None:
    """Several should not count on the same slot, nor take more than they need."""
    cell = busy_cell(5, 5, 5)
    decisions = cell.observe(make_record("a", 8), make_record("b", 9))
    assert preempted(decisions) == ["r2", "r1"]
    assert dispatched(decisions) == [("a", "w"), ("b", "w")]


def test_one_that_gave_way_does_not_give_way_to_its_own_successor() -> None:
    """Queued again, the lower request should wait; there is no room that equals or betters would give it."""
    cell = busy_cell(5)
    assert preempted(cell.observe(make_record("urgent", 9))) == ["r0"]
    cell.report("w", free=60, num_blocks=64, applied=cell.last_entry, held=listed("urgent"))
    back = make_record("r0", 0, max_tokens=200, priority=5, attempt=1, preemptions=1)
    assert preempted(cell.observe(back)) == []


def test_blocks_are_taken_as_slots_are() -> None:
    """With slots to spare and blocks short, a lower class should give way, too, and only as many as are needed."""
    cell = PolicyCell()
    cell.see_workers(make_hello("w", max_num_seqs=8))
    records = [make_record(f"r{i}", i, prompt_len=70, max_tokens=100, priority=2) for i in range(3)]
    cell.observe(*(running(record, "w") for record in records))
    cell.report("w", free=1, held=listed("r0", "r1", "r2", blocks=5, tokens=71))
    decisions = cell.observe(make_record("urgent", 9, prompt_len=40))
    assert preempted(decisions) == ["r2"]
    assert dispatched(decisions) == [("urgent", "w")]


def test_one_at_its_bound_keeps_its_slot() -> None:
    """Preemptions per request should stay bounded, for the sake of any class."""
    cell = PolicyCell(PolicyConfig(max_preemptions=2))
    cell.see_workers(make_hello("w", max_num_seqs=2))
    records = [make_record("tired", 1, priority=9, preemptions=2), make_record("fresh", 2, priority=5)]
    cell.observe(*(running(record, "w") for record in records))
    cell.report("w", free=12, held=listed("tired", "fresh"))
    assert preempted(cell.observe(make_record("urgent", 9))) == ["fresh"]


def test_at_the_wall_the_lowest_class_goes_and_nobody_better_in_its_stead() -> None:
    """The youngest of the lowest class should go; when that one may not, the worker decides by the same order."""
    cell = PolicyCell(PolicyConfig(max_preemptions=1))
    cell.see_workers(make_hello("w"))
    records = [make_record("low", 1, max_tokens=200, priority=1), make_record("high", 2, max_tokens=200)]
    cell.observe(*(running(record, "w") for record in records))
    lists = listed("low", "high", blocks=5, tokens=80)
    assert preempted(cell.report("w", free=1, held=lists)) == ["low"]
    cell.observe(running(replace(records[0], preemptions=1), "w", attempt=2))
    again = (replace(lists[0], attempt=2), lists[1])
    assert preempted(cell.report("w", free=1, applied=cell.last_entry, held=again)) == []


def test_one_that_waits_inside_a_worker_is_helped_when_its_preempt_was_void() -> None:
    """Had the worker evicted by itself meanwhile, the slot should be asked for again once the worker has had two
    steps to give it."""
    cell = busy_cell(5, 5)
    assert preempted(cell.observe(make_record("urgent", 9))) == ["r1"]
    waits = replace(held("urgent", blocks=0, tokens=16), num_running=0, num_waiting=1)
    lists = (*listed("r0", "r1"), waits)
    still = {"free": 60, "num_blocks": 64, "applied": cell.last_entry, "held": lists}
    assert [preempted(cell.report("w", num_steps=10 + i, **still)) for i in range(3)] == [[], [], ["r1"]]


def test_one_that_waits_behind_its_equals_is_fetched_to_where_a_lower_class_runs() -> None:
    """A request that was sent ahead should not wait for one worker's slot while another's has a lower class in it."""
    cell = PolicyCell()
    cell.see_workers(make_hello("w", max_num_seqs=1), make_hello("v", max_num_seqs=1))
    better, low = make_record("better", 1, max_tokens=200), make_record("low", 2, max_tokens=200, priority=5)
    waits = make_record("waits", 3)
    cell.observe(running(better, "w"), running(waits, "w"), running(low, "v"))
    cell.report("v", free=14, held=listed("low"))
    lists = (*listed("better"), replace(held("waits", blocks=0, tokens=16), num_running=0, num_waiting=1))
    assert [preempted(cell.report("w", num_steps=n, free=14, held=lists)) for n in (1, 2, 3)] == [[], [], ["waits"]]
    decisions = cell.observe(replace(waits, attempt=1, preemptions=1))
    assert preempted(decisions) == ["low"]
    assert dispatched(decisions) == [("waits", "v")]


def test_a_waiting_request_rises_a_class_for_each_window_and_no_higher_than_the_best() -> None:
    """Within its window a low request should never overtake; after one window for each better class in use it stands
    there by its arrival, and dispatches as one of that class."""
    cell = PolicyCell(PolicyConfig(aging_s=10.0))
    cell.observe(make_record("low", 1, priority=7), make_record("mid", 2, priority=3), make_record("top", 3))
    cell.now += 9.9
    cell.feed(d.Tick())
    cell.observe(make_record("mid2", 4, priority=3), make_record("top2", 5))
    cell.now += 0.1
    cell.feed(d.Tick())
    decisions = cell.join("w", num_blocks=100)
    assert [name for name, _ in dispatched(decisions)] == ["mid", "top", "top2", "low", "mid2"]
    assert [x.priority for x in decisions if isinstance(x, d.Dispatch)] == [0, 0, 0, 3, 3]


def small_and_large(**config: float) -> PolicyCell:
    """Two thirds of a worker's blocks are taken; `large` does not fit beside, and `small` would."""
    cell = PolicyCell(PolicyConfig(**config))  # type: ignore[arg-type]
    cell.see_workers(make_hello("w"))
    cell.observe(running(make_record("r", 0, max_tokens=200, priority=0), "w"))
    cell.report("w", free=6, held=listed("r", blocks=10, tokens=160))
    assert dispatched(cell.observe(make_record("large", 1, prompt_len=120))) == []
    return cell


def test_small_requests_pass_a_large_one_for_a_bounded_time_only() -> None:
    """Within the time a small one should go out past a large one; afterwards the line stands until that one fits."""
    cell = small_and_large(passing_s=2.0)
    cell.now += 1.9
    assert dispatched(cell.observe(make_record("small", 2))) == [("small", "w")]
    cell.feed(d.Ended(request_ids=(make_record("small").summary.request_id,)))
    cell.now += 0.1
    assert dispatched(cell.observe(make_record("late", 3))) == []
    ended = cell.feed(d.Ended(request_ids=(make_record("r").summary.request_id,)))
    ended += cell.report("w", free=16, applied=cell.last_entry)
    assert [name for name, _ in dispatched(ended)] == ["large", "late"]


def test_a_lower_class_never_passes() -> None:
    """Whatever fits, it should not go out while one of a better class waits."""
    cell = small_and_large(passing_s=2.0)
    assert dispatched(cell.observe(make_record("small", 2, priority=1))) == []


def test_who_holds_the_line_keeps_it_though_another_tenant_has_had_less() -> None:
    """Turns should not let a large request starve: once the line stands it is first, whatever is served meanwhile."""
    cell = small_and_large()
    assert dispatched(cell.observe(make_record("other", 2, tenant="poor"))) == []
    lists = listed("r", blocks=10, tokens=160)
    cell.report("w", free=6, held=(replace(lists[0], num_tokens=216),))
    assert dispatched(cell.report("w", free=6, held=lists)) == []
    ended = cell.feed(d.Ended(request_ids=(make_record("r").summary.request_id,)))
    ended += cell.report("w", free=16, applied=cell.last_entry)
    assert [name for name, _ in dispatched(ended)] == ["large", "other"]


def test_the_delay_factor_waits_for_a_multiple_of_the_latest_prompts_latency() -> None:
    """Beside running requests more should be admitted only when the first has waited that long; on an idle cell at
    once."""
    cell = PolicyCell(PolicyConfig(delay_factor=2.0))
    cell.join("w")
    assert len(dispatched(cell.observe(make_record("a", 1)))) == 1
    cell.now += 1.0
    cell.report("w", free=14, applied=cell.last_entry, held=listed("a", tokens=17))
    assert dispatched(cell.observe(make_record("b", 2))) == []
    cell.now += 2.0
    assert dispatched(cell.feed(d.Tick())) == []
    cell.now += 0.1
    assert dispatched(cell.feed(d.Tick())) == [("b", "w")]
