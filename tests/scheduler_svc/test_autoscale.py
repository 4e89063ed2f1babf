"""How many workers the scheduler would like, and that it does not change its mind for nothing."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.policy.autoscale import AutoscaleConfig, Memory, Picture, wish

CONFIG = AutoscaleConfig(min_workers=1, max_workers=8)


def picture(now: float, num_workers: int = 2, **changes: Any) -> Picture:
    """A cell that is half busy and on time."""
    known = {
        "num_serving": num_workers, "slots_per_worker": 10, "num_queued": 0, "oldest_wait_s": 0.0, "slot_share": 0.5,
        "block_share": 0.2, "ttft_s": 0.1,
    }  # fmt: skip
    return Picture(now=now, num_workers=num_workers, **known | changes)


def wishes(*pictures: Picture) -> list[int]:
    """What is wanted at each of these moments."""
    memory, found = Memory(), []
    for seen in pictures:
        wanted, memory = wish(seen, memory, CONFIG)
        found.append(wanted)
    return found


def test_who_is_on_time_keeps_its_workers() -> None:
    """A cell that is busy enough and answers in time should be left as it is."""
    assert wishes(*(picture(i, slot_share=0.7) for i in range(200))) == [2] * 200


def test_a_queue_that_grows_old_brings_what_it_needs() -> None:
    """Full workers and 40 that wait for 10 slots each are 6 workers' work: 8 at three quarters full. A moment of it
    should bring nobody."""
    late = {"slot_share": 1.0, "num_queued": 40, "oldest_wait_s": 3.0}
    assert wishes(picture(0, **late), picture(1, **late), picture(2, **late)) == [2, 2, 8]
    assert wishes(picture(0, **late), picture(1), picture(2, **late), picture(3, **late)) == [2, 2, 2, 2]


def test_late_first_tokens_and_full_caches_bring_one_more() -> None:
    """Where counting finds no need but clients notice, there should be one more, and none beside one that starts."""
    for late in ({"ttft_s": 0.9}, {"block_share": 0.97}):
        found = wishes(picture(0, 4, slot_share=0.5, **late), picture(2, 4, slot_share=0.5, **late))
        assert found[0] == 4
        assert found[1] > 4
    starting = {"num_serving": 4, "ttft_s": 0.9}
    assert wishes(picture(0, 5, **starting), picture(2, 5, **starting)) == [5, 5]


def test_spare_workers_leave_after_a_while_down_to_the_peak() -> None:
    """After a minute of less work the largest need of that minute should stay, and a moment of need start it anew."""
    calm = [picture(i, 6, slot_share=0.1 if i != 30 else 0.4) for i in range(61)]
    assert wishes(*calm)[:60] == [6] * 60
    assert wishes(*calm)[60] == 4  # 6 workers at 0.4 are 2.4 workers' work, 3.2 at three quarters full
    busy = [picture(i, 6, slot_share=0.1 if i != 30 else 0.9) for i in range(90)]
    assert wishes(*busy) == [6] * 90


@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0, 1), st.floats(0, 1), st.integers(0, 500), st.floats(0, 9))))
def test_limits_hold(seen: list[tuple[int, float, float, int, float]]) -> None:
    """Whatever is seen, no fewer than the minimum and no more than the maximum should be wanted."""
    pictures = [
        picture(i, w, num_serving=w // 2, slot_share=s, block_share=b, num_queued=q, oldest_wait_s=t)
        for i, (w, s, b, q, t) in enumerate(seen)
    ]
    assert all(1 <= wanted <= 8 for wanted in wishes(*pictures))
