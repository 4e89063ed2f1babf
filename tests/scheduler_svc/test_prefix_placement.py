"""Requests go where their prefix is, unless load says otherwise, and blocks that are shared are counted once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scheduler_svc import decisions as d
from shared.bus import RequestRecord
from shared.prefix import pack
from tests.scheduler_svc.cell import PolicyCell, dispatched, held, make_record

NAMES = [bytes([i]) * 8 for i in range(1, 9)]


def bring(name: str, names: list[bytes], order: int = 1, **changes: Any) -> RequestRecord:
    """A record whose only prompt has these names."""
    record = make_record(name, order, **changes)
    return replace(record, summary=replace(record.summary, prefixes=(pack(names),)))


def make_cell(*workers: str, **hello: Any) -> PolicyCell:
    cell = PolicyCell()
    cell.join(*workers, **{"has_prefix_cache": True, "max_num_seqs": 8, "num_blocks": 16} | hello)
    return cell


def test_should_go_where_the_longest_prefix_is() -> None:
    """A prompt should go to the worker that holds most of it, though another one has more free blocks."""
    cell = make_cell("a", "b", "c")
    cell.report("b", free=12, prefixes_here=pack(NAMES[:2]))
    cell.report("c", free=9, prefixes_here=pack(NAMES[:4]))
    assert dispatched(cell.submit(bring("r", NAMES[:5], prompt_len=81))) == [("r", "c")]


def test_should_not_go_where_it_is_crowded() -> None:
    """A short prefix should not outweigh many sequences, and a full worker is no choice at all."""
    cell = make_cell("a", "b")
    busy = [make_record(f"busy{i}", i + 1, prompt_len=1, max_tokens=2) for i in range(3)]
    cell.report("b", free=0)
    assert {worker for _, worker in dispatched(cell.submit(*busy))} == {"a"}
    running = tuple(held(f"busy{i}", blocks=1, tokens=1) for i in range(3))
    cell.report("a", free=13, applied=cell.last_entry, held=running, prefixes_here=pack(NAMES[:1]))
    cell.report("b", free=16)
    assert dispatched(cell.submit(bring("short", NAMES[:1], 10, prompt_len=17))) == [("short", "b")]


def test_should_forget_what_a_worker_has_forgotten() -> None:
    """What a report calls gone should count no more, nor anything known before a report that was lost."""
    cell = make_cell("a", "b")
    cell.report("b", free=12, prefixes_here=pack(NAMES[:4]))
    cell.report("b", free=12, prefixes_gone=pack(NAMES[:1]))
    assert dispatched(cell.submit(bring("r1", NAMES[:4], 1, prompt_len=65))) == [("r1", "a")]
    cell = make_cell("a", "b")
    cell.report("b", free=12, prefixes_here=pack(NAMES[:4]))
    cell._seqs["b"] += 1
    cell.report("b", free=12)
    assert dispatched(cell.submit(bring("r2", NAMES[:4], 2, prompt_len=65))) == [("r2", "a")]


def test_sharers_that_come_together_should_go_together() -> None:
    """Before any report tells of it, a prefix should be looked for where the first one that brought it was sent, and
    its blocks be counted once."""
    cell = make_cell("a", "b", num_blocks=20)
    records = [bring(f"r{i}", NAMES, i, prompt_len=129, max_tokens=1) for i in range(4)]
    sent = dispatched(cell.submit(*records))
    assert len(sent) == 4
    assert len({worker for _, worker in sent}) == 1, "nine blocks for the first one and one for each other fit"


def test_blocks_should_not_be_shared_without_a_cache() -> None:
    """A worker without a prefix cache should be counted with all blocks of each."""
    cell = make_cell("a", num_blocks=20, has_prefix_cache=False)
    records = [bring(f"r{i}", NAMES, i, prompt_len=129, max_tokens=1) for i in range(5)]
    assert len(dispatched(cell.submit(*records))) == 2


def test_blocks_should_not_be_shared_where_a_window_frees_them() -> None:
    """A worker that gives back what lies before a window should be counted with all blocks of each: whether those of
    the others' prefix are still there is not known. One with the same room and no window takes them all."""
    for window, num_sent in ((129, 2), (0, 4)):
        cell = make_cell("a", num_blocks=20, window=window, step_tokens=16)
        records = [bring(f"r{i}", NAMES, i, prompt_len=129, max_tokens=1) for i in range(4)]
        assert len(dispatched(cell.submit(*records))) == num_sent


def test_a_shared_prefix_should_be_counted_again_when_its_users_have_left() -> None:
    """What requests that have ended used should not be held to be there for nothing."""
    cell = make_cell("a", num_blocks=20)
    first = bring("first", NAMES, 1, prompt_len=129, max_tokens=1)
    assert dispatched(cell.submit(first)) == [("first", "a")]
    entry, running = cell.last_entry, held("first", blocks=9, tokens=129)
    cell.report("a", free=8, num_blocks=20, applied=entry, held=(running,))
    assert dispatched(cell.submit(bring("sharer", NAMES, 2, prompt_len=129, max_tokens=1))) == [("sharer", "a")]
    cell.feed(d.Ended(request_ids=tuple(cell.policy.request_ids)))
    cell.report("a", free=8, num_blocks=20, applied=cell.last_entry)
    assert dispatched(cell.submit(bring("late", NAMES, 3, prompt_len=129, max_tokens=1))) == []


def test_wrong_names_should_be_ignored() -> None:
    """A summary with names for another number of prompts should be placed as one without names."""
    cell = make_cell("a")
    record = make_record("r")
    record = replace(record, summary=replace(record.summary, prefixes=(b"x" * 9, b"")))
    assert dispatched(cell.submit(record)) == [("r", "a")]
