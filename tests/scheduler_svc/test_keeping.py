"""Who gives way and stays with its worker, its blocks in host memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scheduler_svc import decisions as d
from scheduler_svc.decision_lines import decode_steps, encode_step
from scheduler_svc.policy.scheduler import PolicyConfig
from shared.messages import HeldRequest, WorkerHello
from tests.scheduler_svc.cell import PolicyCell, dispatched, held, make_hello, make_record, running

CHEAP = {"free_swap_blocks": 32, "block_copy_s": 0.001, "token_s": 0.01}


def preempts(decisions: list[d.Decision]) -> list[tuple[str, bool]]:
    """(request, whether it stays) of each."""
    return [(x.request_id, x.keeps) for x in decisions if isinstance(x, d.Preempt)]


def swapping(name: str = "w", **changes: Any) -> WorkerHello:
    return make_hello(name, num_swap_blocks=32, **changes)


def cell_with(*names: str, config: PolicyConfig | None = None, **changes: Any) -> PolicyCell:
    """A worker `w` with host memory that runs `names`, oldest first, each with a long way to go."""
    cell = PolicyCell(config or PolicyConfig())
    cell.see_workers(swapping(**changes))
    cell.observe(*(running(make_record(name, order, max_tokens=200), "w") for order, name in enumerate(names)))
    return cell


def full(*names: str) -> tuple[HeldRequest, ...]:
    """Each with 80 tokens in exactly filled blocks."""
    return tuple(held(name, blocks=5, tokens=80) for name in names)


def swapped(name: str, tokens: int = 80) -> HeldRequest:
    """One that waits with its blocks in host memory."""
    return replace(held(name, blocks=0, tokens=tokens), num_running=0, num_waiting=1, num_swapped_blocks=5)


def test_one_stays_where_copying_is_cheaper() -> None:
    """The last in standing should stay with its worker if its blocks are copied sooner than computed again."""
    decisions = cell_with("old", "middle", "young").report("w", free=1, held=full("old", "middle", "young"), **CHEAP)
    assert preempts(decisions) == [("young", True)]


def test_one_leaves_where_copying_is_dearer_or_there_is_no_room() -> None:
    """Else it should go back to the queue, as it should with a worker that only computes again."""
    lists = full("old", "middle", "young")
    for changes in ({"block_copy_s": 1.0}, {"free_swap_blocks": 4}):
        cell = cell_with("old", "middle", "young")
        assert preempts(cell.report("w", free=1, held=lists, **CHEAP | changes)) == [("young", False)]
    cell = cell_with("old", "middle", "young", preemption_mode="recompute")
    assert preempts(cell.report("w", free=1, held=lists, **CHEAP)) == [("young", False)]


def test_shared_blocks_count_neither_way() -> None:
    """Blocks that others use, too, should cost nothing: with those the rest of this one fits into host memory."""
    cell = cell_with("old", "middle", "young")
    lists = (*full("old", "middle"), replace(*full("young"), num_shared_blocks=3))
    assert preempts(cell.report("w", free=1, held=lists, **CHEAP | {"free_swap_blocks": 2})) == [("young", True)]


def test_nobody_is_told_to_stay_who_would_be_let_in_again_at_once() -> None:
    """With a free block for each of the others the worker would take it back: it should go when there are fewer."""
    cell = cell_with("old", "middle", "young", max_num_seqs=8)
    lists = tuple(held(name, blocks=5, tokens=79) for name in ("old", "middle", "young"))
    cell.report("w", free=2, num_steps=1, held=lists, **CHEAP)
    assert preempts(cell.report("w", free=2, num_steps=9, held=lists, **CHEAP)) == []
    assert preempts(cell.report("w", free=1, num_steps=10, held=lists, **CHEAP)) == [("young", True)]


def test_room_is_given_once() -> None:
    """Two that must go should not both be sent to room for one."""
    cell = PolicyCell()
    cell.see_workers(swapping(max_num_seqs=2))
    records = [make_record(name, i, max_tokens=200, priority=5) for i, name in enumerate("ab")]
    cell.observe(*(running(record, "w") for record in records))
    cell.report("w", free=6, held=full("a", "b"), **CHEAP | {"free_swap_blocks": 7})
    decisions = cell.observe(make_record("urgent", 9), make_record("urgent2", 10))
    assert preempts(decisions) == [("b", True), ("a", False)]


def test_who_stays_is_told_after_the_newcomer_is_sent() -> None:
    """Told before, it would be let in again while the better one is still on its way."""
    cell = PolicyCell()
    cell.see_workers(swapping(max_num_seqs=1))
    cell.observe(running(make_record("low", 1, max_tokens=200, priority=5), "w"))
    cell.report("w", free=11, held=full("low"), **CHEAP)
    decisions = cell.observe(make_record("urgent", 9))
    assert [type(x) for x in decisions] == [d.Dispatch, d.Preempt]
    assert preempts(decisions) == [("low", True)]


def test_the_claim_of_one_that_stays_is_kept() -> None:
    """Nobody of its class should be placed on the blocks that it needs to come back; a better class comes first."""
    cell = cell_with("old", "young", max_num_seqs=8)
    lists = (*full("old"), swapped("young"))
    cell.report("w", free=8, held=lists, **CHEAP | {"free_swap_blocks": 27})
    assert dispatched(cell.observe(make_record("later", 8, prompt_len=20))) == []
    assert dispatched(cell.observe(make_record("urgent", 9, prompt_len=20, priority=-1))) == [("urgent", "w")]


def test_staying_counts_against_the_bound() -> None:
    """One that has stayed as often as allowed should neither stay nor leave again."""
    cell = cell_with("old", "young", config=PolicyConfig(max_preemptions=2))
    lists = full("old", "young")
    for _ in range(2):
        assert preempts(cell.report("w", free=0, applied=cell.last_entry, held=lists, **CHEAP)) == [("young", True)]
    assert preempts(cell.report("w", free=0, applied=cell.last_entry, held=lists, **CHEAP)) == []
    cell.observe(running(make_record("young", 1, max_tokens=200), "w"))
    assert preempts(cell.report("w", free=0, applied=cell.last_entry, held=lists, **CHEAP)) == []


def test_one_that_stays_is_taken_elsewhere_only_after_it_has_waited() -> None:
    """While another worker is idle it should wait for as long as its 80 tokens take to compute, then be computed there:
    it has lost no more than that."""
    cell = PolicyCell()
    cell.see_workers(swapping("w", max_num_seqs=1), swapping("v", max_num_seqs=1))
    cell.observe(*(running(make_record(n, i, max_tokens=200), "w") for i, n in enumerate(["old", "young"])))
    cell.report("v")
    lists = (*full("old"), swapped("young"))
    rates = CHEAP | {"free_swap_blocks": 27}
    for steps in range(3):
        assert preempts(cell.report("w", free=6, num_steps=10 + steps, held=lists, **rates)) == []
    cell.now += 0.79
    assert preempts(cell.report("w", free=6, num_steps=14, held=lists, **rates)) == []
    cell.now += 0.02
    assert preempts(cell.report("w", free=6, num_steps=15, held=lists, **rates)) == [("young", False)]


def test_a_decision_log_tells_who_stays() -> None:
    """The field should be written and read; a log from before it should read as nobody."""
    cell = cell_with("old", "young")
    (preempt,) = [x for x in cell.report("w", free=0, held=full("old", "young"), **CHEAP) if isinstance(x, d.Preempt)]
    line = encode_step(1.0, d.Tick(), [preempt])
    assert [[preempt]] == [step.decisions for step in decode_steps([line])]
    older = line.replace(b',"keeps":true', b"")
    assert older != line
    assert [[replace(preempt, keeps=False)]] == [step.decisions for step in decode_steps([older])]


def test_a_report_of_more_host_memory_than_there_is_is_not_believed() -> None:
    """Nor should negative rates be: they would make every copy cheap."""
    for changes in ({"free_swap_blocks": 33}, {"free_swap_blocks": -1}, {"block_copy_s": -1.0}, {"token_s": -1.0}):
        cell = cell_with("old", "young")
        assert cell.report("w", free=0, held=full("old", "young"), **CHEAP | changes) == []
