"""Shares inside a class: tokens by weight, nobody saves up turns, users only divide what their tenant gets."""

from __future__ import annotations

import pytest

from scheduler_svc import decisions as d
from scheduler_svc.policy.fairness import MAX_IDLE, QUANTUM_TOKENS, Turns
from scheduler_svc.policy.scheduler import PolicyConfig
from shared.bus import ChoiceState
from shared.ids import RequestId
from tests.scheduler_svc.cell import PolicyCell, dispatched, held, make_record


def serve(turns: Turns, count: int, tokens: int = QUANTUM_TOKENS) -> dict[str, int]:
    """Tokens that each got when the one whose turn it is gets `tokens`, `count` times."""
    served: dict[str, int] = {}
    for _ in range(count):
        name = turns.next()
        assert name is not None
        turns.charge(name, tokens)
        served[name] = served.get(name, 0) + tokens
    return served


def test_tokens_are_shared_by_weight() -> None:
    """Those who always wait should get tokens as their weights are."""
    turns = Turns({"b": 3.0})
    turns.enter("a", 0.0)
    turns.enter("b", 0.0)
    served = serve(turns, 400)
    assert served["b"] / served["a"] == pytest.approx(3.0, rel=0.05)


def test_nobody_saves_up_turns_while_away() -> None:
    """A newcomer should stand level with the one that has had least, not at nought."""
    turns = Turns({})
    turns.enter("a", 0.0)
    serve(turns, 100)
    turns.enter("b", 0.0)
    served = serve(turns, 40)
    assert served["a"] == pytest.approx(served["b"], abs=2 * QUANTUM_TOKENS)


def test_a_debt_outlives_an_absence() -> None:
    """Who was served beyond its share, leaves and comes back should wait until the others have had as much."""
    turns = Turns({})
    turns.enter("a", 0.0)
    turns.enter("b", 0.0)
    turns.charge("a", 20 * QUANTUM_TOKENS)
    turns.leave("a")
    turns.enter("a", 0.0)
    assert serve(turns, 20) == {"b": 20 * QUANTUM_TOKENS}
    assert turns.next() == "a"


def test_what_was_not_served_is_taken_back() -> None:
    """A charge that is returned should leave everything as it was."""
    turns = Turns({})
    turns.enter("a", 0.0)
    turns.enter("b", 0.0)
    turns.charge("a", 9000)
    assert turns.next() == "b"
    turns.charge("a", -9000)
    assert turns.next() == "a"


def test_counters_are_bounded_in_number() -> None:
    """A flood of names should leave no more than those that wait and a bounded number of debts."""
    turns = Turns({})
    turns.enter("stays", 0.0)
    for number in range(3 * MAX_IDLE):
        turns.enter(f"n{number}", 0.0)
        turns.charge(f"n{number}", 9000)
        turns.leave(f"n{number}")
    assert len(turns) <= MAX_IDLE + 1
    assert turns.next() == "stays"


def queue_of(*specs: tuple[str, str, str], **changes: object) -> list[object]:
    """(name, tenant, user) each, by arrival."""
    return [
        make_record(name, order, tenant=tenant, user=user, prompt_len=512, **changes)  # type: ignore[arg-type]
        for order, (name, tenant, user) in enumerate(specs)
    ]


def names_of(decisions: list[d.Decision]) -> list[str]:
    return [name for name, _ in dispatched(decisions)]


def test_tenants_take_turns_and_a_users_flood_harms_only_its_tenant() -> None:
    """A tenant with many requests, or many users, should get no more than another with few."""
    cell = PolicyCell()
    cell.observe(*queue_of(
        ("a1", "a", "u"), ("a2", "a", "u"), ("a3", "a", "v"), ("b1", "b", ""), ("a4", "a", "w"), ("b2", "b", ""),
    ))  # type: ignore[arg-type]  # fmt: skip
    order = names_of(cell.join("w", num_blocks=1000, max_num_seqs=100))
    assert order == ["a1", "b1", "a3", "b2", "a4", "a2"]


def test_weights_give_a_tenant_more_turns() -> None:
    """With weight 2, twice the requests of equal size should go out."""
    cell = PolicyCell(PolicyConfig(tenant_weights={"b": 2.0}))
    specs = [(f"{t}{i}", t, "") for i in range(8) for t in "ab"]
    cell.observe(*queue_of(*specs))  # type: ignore[arg-type]
    order = names_of(cell.join("w", num_blocks=1000, max_num_seqs=8))
    assert [sum(name[0] == tenant for name in order) for tenant in "ab"] == [3, 6]


def test_output_is_counted_as_reports_show_it_and_ends_say() -> None:
    """A tenant that got much output should wait for one that got none, by reports and by the end's own count."""
    for by_report in (True, False):
        cell = PolicyCell()
        cell.join("w", num_blocks=200, max_num_seqs=2)
        cell.observe(make_record("a1", 1, tenant="a", max_tokens=2000), make_record("b1", 2, tenant="b"))
        cell.observe(make_record("x", 3, tenant="c"))
        cell.observe(make_record("a2", 4, tenant="a"), make_record("b2", 5, tenant="b"))
        if by_report:
            lists = (held("a1", blocks=70, tokens=1040), held("b1", blocks=2, tokens=17))
            cell.report("w", free=100, num_blocks=200, held=lists)
        ended = d.Ended(request_ids=(RequestId("a1"),), completion_tokens=() if by_report else (1024,))
        assert names_of(cell.feed(ended)) == ["b2"]


def test_a_request_that_no_worker_took_up_costs_nothing() -> None:
    """Cancelled on its way, its prompt should be taken back from its tenant's counter."""
    cell = PolicyCell()
    cell.join("w", num_blocks=100, max_num_seqs=1)
    cell.observe(make_record("big", 1, tenant="a", prompt_len=600))
    cell.observe(make_record("ahead", 2, tenant="c"))
    cell.observe(make_record("a2", 3, tenant="a"), make_record("b2", 4, tenant="b"))
    decisions = cell.feed(d.Ended(request_ids=(RequestId("big"),)))
    assert names_of(decisions)[0] == "a2"


def test_targets_reorder_tenants_that_are_even_only() -> None:
    """Among even tenants a stream that was interrupted, due sooner, should go before those that have no token yet."""
    cell = PolicyCell(PolicyConfig(ttft_s=0.5, tpot_s=0.05))
    cell.observe(make_record("new", 1, tenant="a"))
    cell.observe(make_record("stream", 2, tenant="b", attempt=1, preemptions=1))
    cell.observe(make_record("logged", 3, tenant="c", attempt=1, choices=(ChoiceState(num_entries=4),)))
    assert names_of(cell.join("w")) == ["logged", "new", "stream"]
