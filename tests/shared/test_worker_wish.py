"""`--autoscale`, read strictly, and what a wish for workers asks of those who carry it out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config import ScalingConfig, SchedulerConfig, ServeConfig, load
from shared.errors import ConfigError
from shared.ids import WorkerId
from shared.worker_wish import OwnWorker, Steps, WorkerLimits, WorkerWish, next_steps

LIMITS = WorkerLimits(low=1, high=4)
A, B, C = (OwnWorker(name=name, worker_id=WorkerId(f"{name}:1")) for name in "abc")


def test_limits_are_read() -> None:
    """MIN:MAX should be what it says; without it nothing is scaled."""
    assert load(SchedulerConfig, ["--autoscale=2:8"], program="test").scaling.limits() == WorkerLimits(low=2, high=8)
    assert ScalingConfig().limits() is None


@pytest.mark.parametrize(
    "text", ["3", "1:", ":2", "0:2", "3:2", "1:2:3", "a:b", "-1:2", "1:1001", "1: 2", "١:٢", "1:" + "9" * 5000]
)
def test_what_are_no_limits_is_refused(text: str) -> None:
    """The error should name flag, value and form, however long the value is."""
    with pytest.raises(
        ConfigError, match=r"--autoscale=.*: must be MIN:MAX with 1 <= MIN <= MAX <= 1000, as 1:8"
    ) as error:
        load(ServeConfig, [f"--autoscale={text}"], program="test")
    assert len(str(error.value)) < 300


def test_too_few_are_filled_up_within_the_limits() -> None:
    """As many should be started as are missing, never more than the limit."""
    assert next_steps([A], WorkerWish(num_workers=3), LIMITS) == Steps(num_to_start=2)
    assert next_steps([A], WorkerWish(num_workers=9), LIMITS) == Steps(num_to_start=3)
    assert next_steps([], WorkerWish(num_workers=0), LIMITS) == Steps(num_to_start=1)


def test_only_who_is_named_is_stopped() -> None:
    """The leader's first names should go, no more than are too many, and nobody while none is named."""
    wish = WorkerWish(num_workers=1, leaving=(WorkerId("b:1"), WorkerId("x:1"), WorkerId("a:1")))
    assert next_steps([A, B, C], wish, LIMITS) == Steps(to_stop=("b", "a"))
    assert next_steps([A, B], wish, LIMITS) == Steps(to_stop=("b",))
    assert next_steps([A, B, C], WorkerWish(num_workers=1), LIMITS) == Steps()
    assert next_steps([A], wish, LIMITS) == Steps()


def test_who_does_not_run_goes_first() -> None:
    """A worker that is down should go before one that works, named or not; one that starts should be left alone."""
    down = OwnWorker(name="d", worker_id=None, is_running=False)
    starting = OwnWorker(name="e", worker_id=None)
    wish = WorkerWish(num_workers=2, leaving=(WorkerId("b:1"),))
    assert next_steps([A, B, down], wish, LIMITS) == Steps(to_stop=("d",))
    assert next_steps([A, B, starting], wish, LIMITS) == Steps(to_stop=("b",))
    assert next_steps([A, C, starting], wish, LIMITS) == Steps()


@given(st.integers(0, 9), st.integers(0, 9), st.lists(st.integers(0, 9), unique=True))
def test_steps_never_lead_beyond_the_wish(num_own: int, num_wanted: int, leaving: list[int]) -> None:
    """After any steps there should be no more and no fewer than wanted, unless too many are left for want of names."""
    own = [OwnWorker(name=str(i), worker_id=WorkerId(str(i))) for i in range(num_own)]
    wish = WorkerWish(num_workers=num_wanted, leaving=tuple(WorkerId(str(i)) for i in leaving))
    steps = next_steps(own, wish, LIMITS)
    left = num_own + steps.num_to_start - len(steps.to_stop)
    wanted = LIMITS.clamp(num_wanted)
    assert left == wanted or (left > wanted and steps.num_to_start == 0)
    assert set(steps.to_stop) <= {str(i) for i in leaving}
