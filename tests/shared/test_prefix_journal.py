"""What reports tell of the prefix cache."""

from __future__ import annotations

from shared.prefix import pack, unpack
from shared.prefix_journal import MAX_TOLD, NUM_REPEATED, PrefixJournal


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")[::-1]


def test_should_tell_what_is_there_in_the_end() -> None:
    """A name that came and went between two reports should be told as gone, one that came back as here."""
    journal = PrefixJournal()
    journal.note(
        [(name(1), True), (name(2), True), (name(1), False), (name(3), True), (name(3), False), (name(3), True)]
    )
    here, gone = journal.take()
    assert set(unpack(here)) == {name(2)[:8], name(3)[:8]}
    assert unpack(gone) == [name(1)[:8]]
    journal.note([(name(2), False)])
    here, gone = journal.take()
    assert (unpack(here), unpack(gone)) == ([name(3)[:8]], [name(2)[:8]])


def test_should_repeat_everything_in_turns() -> None:
    """Who hears only later reports should know all names after a while."""
    journal = PrefixJournal()
    names = [name(i) for i in range(3 * NUM_REPEATED)]
    journal.note((n, True) for n in names)
    journal.take()
    heard = [unpack(journal.take()[0]) for _ in range(3)]
    assert [len(h) for h in heard] == [NUM_REPEATED] * 3
    assert {n for h in heard for n in h} == {n[:8] for n in names}


def test_a_report_should_have_a_bounded_size() -> None:
    """However much has changed, a report should tell a part and the next ones the rest."""
    journal = PrefixJournal()
    journal.note((name(i), True) for i in range(MAX_TOLD + 5))
    here, _ = journal.take()
    assert len(unpack(here)) == MAX_TOLD + NUM_REPEATED
    here, _ = journal.take()
    assert {name(MAX_TOLD + i)[:8] for i in range(5)} <= set(unpack(here))


def test_a_cut_name_is_left_out() -> None:
    """Bytes of no whole name at the end should be ignored."""
    assert unpack(pack([name(1)]) + b"abc") == [name(1)[:8]]
