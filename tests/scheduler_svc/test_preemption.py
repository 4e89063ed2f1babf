"""Who gives way before a worker's blocks run out."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc import decisions as d
from scheduler_svc.policy.scheduler import PolicyConfig
from shared.bus import ChoiceState
from shared.messages import HeldRequest
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
