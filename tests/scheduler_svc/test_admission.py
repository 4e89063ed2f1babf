"""Who is let in, in which order, and who never can be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc import decisions as d
from scheduler_svc.policy.scheduler import PolicyConfig
from shared.bus import ChoiceState
from shared.capacity import blocks_for, fits, most_tokens, never_fits_message, resident_tokens
from shared.ids import RequestId
from tests.scheduler_svc.cell import PolicyCell, dispatched, held, make_hello, make_record, running


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (128, 8)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    """Only the last block should be part-empty."""
    assert blocks == blocks_for(tokens, 16)


def test_fits_at_the_very_edge() -> None:
    """A sequence should fit when it takes the last block, and not with one token more."""
    assert fits(128, block_size=16, num_blocks=8)
    assert not fits(129, block_size=16, num_blocks=8)
    assert "129 tokens, 9 blocks of 16" in never_fits_message(129, block_size=16, num_blocks=8)


@pytest.mark.parametrize(("window", "step_tokens", "block_size"), [(1, 1, 4), (7, 3, 4), (8, 4, 4), (9, 64, 16)])
def test_a_window_bounds_what_a_sequence_holds(window: int, step_tokens: int, block_size: int) -> None:
    """The formula should be the most blocks of any step of a sequence: from the first key that its first row sees to
    the last token it computes; and no more than its tokens fill."""
    num_resident = resident_tokens(window, step_tokens)
    for length in (1, 5, 20, 200):
        ends = {start: min(length, start + step_tokens) for start in range(length)}
        held = [-(-end // block_size) - max(0, start - window + 1) // block_size for start, end in ends.items()]
        assert blocks_for(length, block_size, num_resident) >= max(held)
    assert blocks_for(10_000, block_size, num_resident) == max(held)


def test_a_long_request_fits_where_its_window_does() -> None:
    """10,000 tokens should fit a pool of a window and a step, and not one of a block less; nothing should be refused
    for its length then."""
    sizes = {"block_size": 16, "num_resident": resident_tokens(256, 64)}
    assert fits(10_000, num_blocks=21, **sizes)
    assert not fits(10_000, num_blocks=20, **sizes)
    assert most_tokens(limit=10_000, num_blocks=21, **sizes) == 10_000
    assert most_tokens(limit=10_000, num_blocks=20, **sizes) == 320
    assert "21 blocks of 16" in never_fits_message(10_000, num_blocks=20, **sizes)


def test_a_windowed_worker_is_counted_by_its_window() -> None:
    """Long requests should go to a worker as long as their windows and steps fit, and once they decode count with the
    blocks of their windows: nobody is preempted for growth that there will not be."""
    cell = PolicyCell()
    cell.join("w", num_blocks=40, window=128, step_tokens=64)
    records = [make_record(f"r{i}", i, prompt_len=2000, max_tokens=500) for i in range(4)]
    assert len(dispatched(cell.submit(*records))) == 3
    listed = tuple(held(f"r{i}", blocks=9, tokens=2100) for i in range(3))
    decisions = cell.report("w", free=13, applied=cell.last_entry, held=listed)
    assert dispatched(decisions) == [("r3", "w")]
    assert not [x for x in decisions if isinstance(x, d.Preempt)]


def test_a_request_goes_out_only_after_the_workers_first_report() -> None:
    """Nothing should be sent to a worker whose free blocks this leader has not heard of."""
    cell = PolicyCell()
    assert cell.see_workers(make_hello("w")) == []
    assert cell.observe(make_record("a")) == []
    assert dispatched(cell.report("w")) == [("a", "w")]


def test_a_request_without_a_worker_of_its_model_waits() -> None:
    """Another model's worker should not get it, and it should not hold up that model's queue."""
    cell = PolicyCell()
    cell.join("w")
    assert cell.observe(make_record("other", 1, fingerprint="g")) == []
    assert dispatched(cell.observe(make_record("a", 2))) == [("a", "w")]
    cell.see_workers(make_hello("w"), make_hello("v", fingerprint="g"))
    assert dispatched(cell.report("v")) == [("other", "v")]


@pytest.mark.case(71)
def test_what_can_never_fit_is_rejected_at_once_and_blocks_nobody() -> None:
    """A prompt of 200 tokens for a pool of 8 blocks should get a 400 that names the numbers; the next is served."""
    cell = PolicyCell()
    cell.join("w", num_blocks=8)
    decisions = cell.observe(make_record("big", 1, prompt_len=200), make_record("small", 2, prompt_len=5))
    (reject,) = [x for x in decisions if isinstance(x, d.Reject)]
    assert reject.request_id == "big"
    assert all(number in reject.message for number in ("216", "14 blocks", "16", "8 blocks"))
    assert dispatched(decisions) == [("small", "w")]


@pytest.mark.case(71)
def test_what_waited_before_any_worker_is_rejected_when_the_first_one_is_too_small() -> None:
    """Only live workers should count, and those that come later are asked, too."""
    cell = PolicyCell()
    assert cell.observe(make_record("big", prompt_len=200)) == []
    decisions = cell.see_workers(make_hello("w", num_blocks=8))
    assert [x.request_id for x in decisions if isinstance(x, d.Reject)] == ["big"]


def test_a_request_that_has_run_waits_for_a_larger_worker() -> None:
    """Tokens should never be thrown away since only a small worker is left; others pass it."""
    cell = PolicyCell()
    cell.join("small", num_blocks=8)
    decisions = cell.observe(make_record("a", 1, prompt_len=200, attempt=1), make_record("b", 2))
    assert dispatched(decisions) == [("b", "small")]
    assert not [x for x in decisions if isinstance(x, d.Reject)]
    cell.see_workers(make_hello("small", num_blocks=8), make_hello("large"))
    assert dispatched(cell.report("large")) == [("a", "large")]


def test_order_is_arrival_and_the_front_is_never_passed() -> None:
    """While the front does not fit, a smaller request behind it should wait, too."""
    cell = PolicyCell()
    cell.join("w")
    cell.observe(make_record("first", 1, prompt_len=160, max_tokens=16))
    assert dispatched(cell.observe(make_record("second", 2, prompt_len=100), make_record("third", 3))) == []
    cell.report("w", free=6, applied=cell.last_entry, held=(held("first", blocks=10, tokens=160),))
    decisions = cell.feed(d.Ended(request_ids=(make_record("first").summary.request_id,)))
    decisions += cell.report("w", free=16, applied=cell.last_entry)
    assert [name for name, _ in dispatched(decisions)] == ["second", "third"]


def test_a_released_request_keeps_its_place() -> None:
    """Given back, a request should stand before those that came later."""
    cell = PolicyCell()
    cell.observe(make_record("late", 5), make_record("early", 2, attempt=3, preemptions=1))
    assert [name for name, _ in dispatched(cell.join("w"))] == ["early", "late"]


def test_what_was_sent_and_is_not_reported_yet_is_counted() -> None:
    """A report from before the dispatch should not make blocks look free twice."""
    cell = PolicyCell()
    cell.join("w")
    assert len(dispatched(cell.observe(make_record("a", 1, prompt_len=150, max_tokens=50)))) == 1
    assert dispatched(cell.observe(make_record("b", 2, prompt_len=80))) == []
    assert dispatched(cell.report("w", free=16, applied="0-0")) == []


def test_tokens_already_logged_count_as_prompt() -> None:
    """A request that comes back with output should be counted with it."""
    cell = PolicyCell()
    cell.join("w", num_blocks=8)
    logged = (ChoiceState(num_entries=90),)
    cell.observe(make_record("a", 1, prompt_len=16, max_tokens=100, attempt=1, choices=logged))
    assert dispatched(cell.observe(make_record("b", 2, prompt_len=16))) == []


def test_all_choices_go_to_one_worker_and_an_over_large_request_gets_it_alone() -> None:
    """Demand should be capped by the worker, so that a request of many choices runs in portions."""
    cell = PolicyCell()
    cell.join("w", "v")
    many = make_record("many", 1, prompt_len=100, n=8)
    first = dispatched(cell.observe(many))
    assert len(first) == 1
    second = dispatched(cell.observe(make_record("more", 2, prompt_len=100, n=8)))
    assert {"w", "v"} == {worker for _, worker in first + second}
    assert dispatched(cell.observe(make_record("a", 3))) == []


def test_only_unfinished_choices_count() -> None:
    """Choices that have finished should take neither blocks nor slots."""
    cell = PolicyCell()
    cell.join("w", num_blocks=8)
    done = ChoiceState(num_entries=5, finish="stop")
    choices = (done, done, done, ChoiceState())
    record = make_record("a", 1, prompt_len=30, n=4, attempt=1, choices=choices)
    decisions = cell.observe(record, make_record("b", 2, prompt_len=30))
    assert [name for name, _ in dispatched(decisions)] == ["a", "b"]


def test_one_request_is_kept_ahead_of_the_slots() -> None:
    """A worker with all slots taken should have one more request at hand, and not two."""
    cell = PolicyCell()
    cell.join("w", max_num_seqs=2, num_blocks=100)
    decisions = cell.observe(*(make_record(f"r{i}", i) for i in range(5)))
    assert len(dispatched(decisions)) == 3


def test_a_free_slot_is_better_than_a_place_ahead() -> None:
    """Placement should prefer a worker where the request runs at once, even with fewer free blocks."""
    cell = PolicyCell()
    cell.see_workers(make_hello("full", max_num_seqs=1, num_blocks=100), make_hello("idle", num_blocks=8))
    cell.report("full", free=100, num_blocks=100)
    assert dispatched(cell.observe(make_record("a", 1))) == [("a", "full")]
    cell.report("idle", free=8, num_blocks=8)
    assert dispatched(cell.observe(make_record("b", 2))) == [("b", "idle")]


def test_placement_takes_the_worker_with_most_free_blocks() -> None:
    """Load should spread by what is free."""
    cell = PolicyCell()
    cell.join("w", "v", "u")
    decisions = cell.observe(*(make_record(f"r{i}", i) for i in range(6)))
    assert [sum(w == name for _, w in dispatched(decisions)) for name in ("u", "v", "w")] == [2, 2, 2]


def test_a_certain_end_within_two_steps_counts_as_free() -> None:
    """The next request should be sent before the slot's owner has quite ended."""
    cell = PolicyCell()
    cell.join("w", num_blocks=4)
    cell.observe(make_record("a", 1, prompt_len=30, max_tokens=30))
    cell.observe(make_record("b", 2, prompt_len=30, max_tokens=30))
    far = (held("a", blocks=3, tokens=48),)
    assert dispatched(cell.report("w", free=1, num_blocks=4, applied=cell.last_entry, held=far)) == []
    near = (held("a", blocks=4, tokens=59),)
    assert [n for n, _ in dispatched(cell.report("w", free=0, applied=cell.last_entry, held=near))] == ["b"]


def test_a_draining_worker_gets_nothing_new() -> None:
    """A worker that says it drains should be left alone."""
    cell = PolicyCell()
    cell.join("w")
    cell.report("w", is_draining=True)
    assert dispatched(cell.observe(make_record("a"))) == []


def test_a_liar_is_not_believed_beyond_its_size() -> None:
    """More free blocks than a worker has, or fewer than none, should count as all and as none."""
    cell = PolicyCell()
    cell.join("w", num_blocks=8, max_num_seqs=100)
    cell.report("w", free=1_000_000)
    decisions = cell.observe(*(make_record(f"r{i}", i) for i in range(20)))
    assert len(dispatched(decisions)) == 4
    assert dispatched(cell.report("w", free=-5, applied=cell.last_entry)) == []


def test_a_record_read_before_our_dispatch_changes_nothing() -> None:
    """A stale queued record should not send the request a second time."""
    cell = PolicyCell()
    cell.join("w")
    record = make_record("a")
    assert len(dispatched(cell.observe(record))) == 1
    assert cell.observe(record) == []
    assert cell.observe(replace(running(record, "w"), listeners=record.listeners)) == []
    assert cell.policy.num_running == 1


def test_a_refused_dispatch_is_looked_up() -> None:
    """When the bus says it is not queued, the record should decide."""
    cell = PolicyCell()
    cell.join("w")
    record = make_record("a")
    cell.observe(record)
    refused = cell.feed(d.DispatchRefused(request_id=record.summary.request_id))
    assert [d.Recheck(request_ids=(record.summary.request_id,))] == refused
    assert dispatched(cell.observe(record)) == [("a", "w")]


def test_ranks_follow_arrival() -> None:
    """Earlier requests should have lower ranks, within a millisecond, too, and small enough for Lua's numbers."""
    cell = PolicyCell()
    cell.join("w", num_blocks=100)
    now_ms = 1_796_000_000_000
    orders = [(now_ms, 0), (now_ms, 1), (now_ms, 9999), (now_ms + 1, 0)]
    records = [replace(make_record(f"r{i}"), order=order) for i, order in enumerate(orders)]
    decisions = cell.observe(*records)
    ranks = [x.rank for x in decisions if isinstance(x, d.Dispatch)]
    assert sorted(set(ranks)) == ranks
    assert ranks[-1] < 2**53


def test_a_wake_up_is_enough_to_place_a_request_once() -> None:
    """A new request should go out by its wake-up, by the rules for all; another wake-up should change nothing."""
    cell = PolicyCell()
    cell.join("w:1")
    records = [make_record("a"), make_record("large", prompt_len=2000), make_record("b", order=2)]
    decisions = cell.submit(*records)
    assert [("a", "w:1"), ("b", "w:1")] == dispatched(decisions)
    assert [RequestId("large")] == [decision.request_id for decision in decisions if isinstance(decision, d.Reject)]
    assert cell.submit(records[0], records[2]) == []


def test_a_wake_up_changes_nothing_of_what_is_known() -> None:
    """A late wake-up of a request that runs should leave it where it is, and its attempt as it was."""
    cell = PolicyCell()
    cell.join("w:1")
    record = make_record("a")
    cell.observe(running(record, "w:1", attempt=3))
    assert cell.submit(record) == []
    assert cell.policy.num_running == 1


def test_a_request_placed_by_its_wake_up_is_no_orphan() -> None:
    """Before its record shows who listens it should not be taken for one that nobody listens to."""
    cell = PolicyCell(PolicyConfig(orphan_ttl_s=0.0))
    cell.join("w:1")
    record = make_record("a")
    cell.submit(record)
    cell.now += 1.0
    assert cell.feed(d.Tick()) == []
    assert cell.observe(running(record, "w:1")) == []


def test_reserved_memory_is_counted_whole() -> None:
    """A worker that reserves room for the longest sequence should be sent no more sequences than that allows."""
    cell = PolicyCell()
    cell.join("w", num_blocks=16, reserved_tokens=128)
    records = [make_record(f"r{i}", i, prompt_len=16, max_tokens=50) for i in range(4)]
    assert len(dispatched(cell.submit(*records))) == 2
    listed = tuple(held(f"r{i}", blocks=8, tokens=17) for i in range(2))
    cell.report("w", free=0, applied=cell.last_entry, held=listed)
    assert cell.policy.num_running == 2


def test_the_choices_of_a_prompt_count_it_once() -> None:
    """Of 4 choices with 7 blocks of prompt and 1 of output each, 6 whole blocks of the prompt should be counted once:
    14 blocks in all, which leave 2; not so where each sequence has memory of its own."""
    for reserved_tokens, expected in ((0, [("many", "w"), ("small", "w")]), (1, [("many", "w")])):
        cell = PolicyCell()
        cell.join("w", reserved_tokens=reserved_tokens, max_num_seqs=8)
        decisions = cell.observe(make_record("many", 1, prompt_len=100, n=4), make_record("small", 2))
        assert dispatched(decisions) == expected


def test_choices_that_wait_in_a_worker_count_their_prompt_once() -> None:
    """The same should hold once a report lists them, none running yet or some of them."""
    cell = PolicyCell()
    cell.see_workers(make_hello("w", max_num_seqs=8))
    cell.observe(running(make_record("many", 1, prompt_len=100, n=4), "w"))
    none = replace(held("many", blocks=0, tokens=400), num_running=0, num_waiting=4)
    cell.report("w", free=16, held=(none,))
    assert dispatched(cell.observe(make_record("small", 2))) == [("small", "w")]
    cell.feed(d.Ended(request_ids=(make_record("small").summary.request_id,)))
    one = replace(held("many", blocks=7, tokens=400), num_running=1, num_waiting=3)
    cell.report("w", free=9, applied="9-9", held=(one,))
    assert dispatched(cell.observe(make_record("second", 3))) == [("second", "w")]
    assert dispatched(cell.observe(make_record("third", 4))) == []
