"""Where prefixes are, as told by reports."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.policy.prefix_index import PrefixIndex
from shared.ids import WorkerId

WORKERS = [WorkerId(f"w{i}") for i in range(4)]
NAMES = [bytes([i]) * 8 for i in range(6)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(WORKERS), st.sampled_from(["note", "note", "note", "forget"]),
            st.lists(st.sampled_from(NAMES), max_size=5), st.lists(st.sampled_from(NAMES), max_size=2),
        ),
        max_size=30,
    ),
    st.lists(st.sampled_from(NAMES), max_size=6),
)  # fmt: skip
def test_should_know_how_much_of_a_prompt_each_worker_holds(
    events: list[tuple[WorkerId, str, list[bytes], list[bytes]]], asked: list[bytes]
) -> None:
    """After any reports and departures the answer should be that of plain sets, and no name be kept that nobody has."""
    index, held = PrefixIndex(), {worker: set[bytes]() for worker in WORKERS}
    for worker, what, here, gone in events:
        if what == "forget":
            index.forget(worker)
            held[worker].clear()
        else:
            index.note(worker, here, gone)
            held[worker] = (held[worker] | set(here)) - set(gone)
    expected = {}
    for worker, names in held.items():
        depth = next((i for i, name in enumerate(asked) if name not in names), len(asked))
        if depth:
            expected[worker] = depth
    assert index.longest(asked) == expected
    assert len(index) == len(set[bytes]().union(*held.values()))
