"""Each rule of the policy, broken on purpose: the property that holds the rule should then fail.

A mutant replaces the one function in which the rule lies; a property that does not notice is no test of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from scheduler_svc.policy import admission, dispatching, keeping, line, preemption, yielding
from scheduler_svc.policy.deadlines import Deadlines
from scheduler_svc.policy.fairness import Turns
from scheduler_svc.policy.fleet import Fleet
from scheduler_svc.policy.queue import Queue
from scheduler_svc.policy.state import Request
from tests.simulation import test_order as order
from tests.simulation import test_properties as basic
from tests.simulation.traces import costs, requests, worker_specs

ENOUGH = 400
"""Traces to catch a mutant with; most are caught within ten."""

_ordered = requests(is_ordered=True)
PROPERTIES: dict[Callable[..., None], tuple[st.SearchStrategy[Any], ...]] = {
    basic.holds_blocks: (requests(), st.lists(worker_specs(15), min_size=1, max_size=3), costs),
    basic.holds_refusals: (requests(max_prompt=150), st.lists(worker_specs(4), min_size=1, max_size=2)),
    order.holds_order: (_ordered, order.workers_lists, costs),
    order.holds_aging: (_ordered, order.workers_lists, costs, st.floats(0.1, 2.0)),
    order.holds_rising: (st.integers(60, 100),),
    order.holds_passing: (order.small_ones, st.floats(0.1, 2.0), costs, st.floats(0.1, 1.0)),
    order.holds_shares: (order.shared_sizes, st.sampled_from([0.5, 2.0])),
    basic.holds_claims: (st.floats(0.02, 0.1),),
    basic.holds_bounds: (st.floats(0.02, 0.1),),
    order.holds_standing: (st.floats(0.01, 0.1),),
    order.holds_bounds: (st.floats(0.05, 0.15), st.sampled_from([0, 60])),
    order.holds_room: (st.integers(12, 40),),
    order.holds_deadlines: (requests(is_ordered=True, can_expire=True), costs),
}


@dataclass(frozen=True)
class Mutant:
    """`change` makes the broken function of the true one, which is attribute `name` of `owner`."""

    rule: str
    owner: Any
    name: str
    change: Callable[[Any], Any]
    broken: Callable[..., None]


def _lowest_class_first(true: Any) -> Any:
    def first(self: Queue, fingerprint: str) -> Any:
        lane = self._lanes.get(fingerprint)
        return lane.lines[lane.queued[-1]].first() if lane is not None and lane.queued else None

    return first


def _youngest_first(true: Any) -> Any:
    return lambda self, request, *key: true(self, request, *(-k for k in key))


def _order_of_queueing(true: Any) -> Any:
    count = iter(range(10**9))
    return lambda self, request, *key: true(self, request, next(count))


def _to_equals(true: Any) -> Any:
    return lambda self, other, level: true(self, other, level - 1)


def _rise_above_all(true: Any) -> Any:
    def rise(self: Queue, lane: Any, request: Any) -> None:
        if request.request_id not in lane.parked:
            self._leave(lane, request)
            self._count(lane, request.level - 1, +1)
            self._count(lane, request.level, -1)
            request.rise(request.level - 1)
            self._enter(lane, request)

    return rise


def _oldest_gives_way(true: Any) -> Any:
    return lambda candidates, most: true(list(reversed(candidates)), most)


def _pass_for_ever(true: Any) -> Any:
    return lambda queue, fleet, blocked, rules, now: true(queue, fleet, blocked, replace(rules, passing_s=1e9), now)


def _nobody_is_too_tired(true: Any) -> Any:
    return lambda *who: true(*who[:-1], 10**9)


def _whatever_room(true: Any) -> Any:
    return lambda mode, **is_known: true(mode, **is_known | {"free_swap_blocks": 10**9})


def _no_claim_of_swapped(true: Any) -> Any:
    def claim(worker: Any, request: Any, room: int) -> tuple[int, int]:
        is_swapped = request.held is not None and request.held.num_swapped_blocks
        return (0, 0) if is_swapped else true(worker, request, room)

    return claim


MUTANTS = (
    Mutant("a better class goes first", Queue, "first", _lowest_class_first, order.holds_order),
    Mutant("a user's requests go by arrival", line.Heap, "add", _youngest_first, order.holds_order),
    Mutant("seniority outlives a preemption", line.Heap, "add", _order_of_queueing, order.holds_order),
    Mutant("a lower class yields", yielding, "choose", lambda true: lambda *_: None, order.holds_order),
    Mutant("equals do not yield", yielding._Room, "_count", _to_equals, order.holds_order),
    Mutant("the last in standing gives way", preemption, "_last", _oldest_gives_way, order.holds_standing),
    Mutant("preemptions at the wall are bounded", preemption, "_last", _nobody_is_too_tired, basic.holds_bounds),
    Mutant("preemptions for a better class are bounded", yielding, "choose", _nobody_is_too_tired, order.holds_bounds),
    Mutant(
        "nobody rises within its window",
        Queue,
        "age",
        lambda true: lambda self, now: true(self, now + 1e6),
        order.holds_aging,
    ),
    Mutant("nobody rises above the best", Queue, "_rise", _rise_above_all, order.holds_aging),
    Mutant("who waits rises", Queue, "age", lambda true: lambda self, now: None, order.holds_rising),
    Mutant("passing ends", dispatching, "_pass", _pass_for_ever, order.holds_passing),
    Mutant("tokens are counted", Turns, "charge", lambda true: lambda *_: None, order.holds_shares),
    Mutant(
        "weights count",
        Turns,
        "charge",
        lambda true: lambda self, name, tokens: true(self, name, tokens * self._weights.get(name, 1.0)),
        order.holds_shares,
    ),
    Mutant("late work ends", Deadlines, "due", lambda true: lambda self, now: [], order.holds_deadlines),
    Mutant("blocks are not given twice", admission, "demand", lambda true: lambda *_: 0, basic.holds_blocks),
    Mutant("who stays counts as preempted", Request, "keep", lambda true: lambda self: None, order.holds_bounds),
    Mutant("nobody stays without room", keeping, "is_swapped", _whatever_room, order.holds_room),
    Mutant("room is promised once", keeping, "_num_promised", lambda true: lambda worker: 0, order.holds_room),
    Mutant("who stays does not bounce", preemption, "_comes_back", lambda true: lambda *_: False, order.holds_order),
    Mutant("a swapped one keeps its claim", admission, "claim", _no_claim_of_swapped, basic.holds_claims),
    Mutant("what never fits is refused", Fleet, "can_ever_hold", lambda true: lambda *_: True, basic.holds_refusals),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule)
def test_a_broken_rule_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rule broken its property should fail."""
    true = getattr(mutant.owner, mutant.name)
    monkeypatch.setattr(mutant.owner, mutant.name, mutant.change(true))
    with pytest.raises(AssertionError):
        _try(mutant.broken)


def _try(holds: Callable[..., None]) -> None:
    """Raise what the first trace raises on which `holds` fails."""

    @settings(
        max_examples=ENOUGH,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.tuples(*PROPERTIES[holds]))
    def run(trace: tuple[Any, ...]) -> None:
        holds(*trace)

    run()
