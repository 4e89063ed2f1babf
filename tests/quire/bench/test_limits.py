"""The machine's limits: a real compiler, a tiny size."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from quire.bench import limits
from quire.bench.limits import Effort, LimitsUnknown

TINY = Effort(mib=4, repeats=1, rounds=10_000)

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")


@needs_compiler
def test_rates_are_positive_and_ordered() -> None:
    """Every rate that the processor has should be a positive number, and none of a type that it lacks."""
    found = limits.measure(TINY, threads=2)
    assert found.threads == 2
    rates = [rate for name, rate in dataclasses.asdict(found).items() if name != "threads" and rate is not None]
    assert len(rates) >= 3
    assert all(1e6 < rate < 1e16 for rate in rates)
    line = limits.describe(found)
    assert f"{found.read / 1e9:.1f} GB/s" in line
    assert ("int8 none" in line) == (found.int8 is None)


@needs_compiler
@pytest.mark.parametrize("arguments", [[], ["0", "4", "1", "1"], ["1", "4", "1000", "1"], ["1", "4", "1", "0"]])
def test_wrong_numbers_are_refused(arguments: list[str], tmp_path: Path) -> None:
    """The program should refuse numbers that it cannot measure with, rather than print nonsense."""
    program = limits._compile(tmp_path)
    with pytest.raises(LimitsUnknown, match="limits: "):
        limits._run([str(program), *arguments])


def test_no_compiler_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler the caller should learn why there are no limits."""
    monkeypatch.setattr(limits, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(LimitsUnknown, match=r"no C compiler \(no-such-compiler\)"):
        limits.measure(TINY)


def test_f32_stands_in_for_a_missing_type() -> None:
    """Where the processor has no bf16 or int8 products, they should count at the rate of f32."""
    old = limits.Limits(threads=1, read_one=1, read=1, f32=5, bf16=None, int8=7)
    assert (old.rate("bf16"), old.rate("int8")) == (5, 7)


def test_two_measurements_show_the_better_of_each() -> None:
    """A machine that was disturbed in one of two measurements should be known by the other."""
    first = limits.Limits(threads=2, read_one=1, read=5, f32=5, bf16=None, int8=7)
    second = limits.Limits(threads=2, read_one=2, read=4, f32=6, bf16=None, int8=3)
    assert limits.better(first, second) == limits.Limits(threads=2, read_one=2, read=5, f32=6, bf16=None, int8=7)
