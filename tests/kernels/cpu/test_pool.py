"""Threads that run programs: started in one place, waited for in another."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from kernels.cpu.ops import Step
from kernels.cpu.program import Pool, Program, address
from kernels.cpu.rows import add_norm
from tests.kernels.cpu.conftest import Machine
from tests.waiting import wait_until

ROWS, HIDDEN = 64, 64


class Doubling:
    """A program of many norms, each reading what the one before it wrote: any op that begins too early shows."""

    def __init__(self, num_ops: int = 40) -> None:
        self.rows = [torch.full((ROWS, HIDDEN), torch.nan) for _ in range(num_ops + 1)]
        self.program = Program()
        self._scale = torch.linspace(0.5, 1.5, HIDDEN)
        for x, y in zip(self.rows, self.rows[1:], strict=False):
            add_norm(self.program, x, self._scale, y, 1e-6)

    def step(self, seed: int) -> tuple[Step, Tensor]:
        """A step over new rows, and what should come out."""
        self.rows[0].copy_(torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(seed)))
        for row in self.rows[1:]:
            row.fill_(torch.nan)
        expected = self.rows[0]
        for _ in self.rows[1:]:
            expected = expected * torch.rsqrt(expected.square().mean(dim=1, keepdim=True) + 1e-6) * self._scale
        wanted = torch.arange(ROWS)
        step = Step(num_rows=ROWS, num_wanted=ROWS, wanted_rows=address(wanted))
        self._wanted = wanted
        return step, expected


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_started_programs_should_be_done_after_the_wait(machine: Machine, num_threads: int) -> None:
    """Whatever lies between a start and its wait, and however often, results should be whole."""
    pool, case = machine.pools[num_threads], Doubling()
    for seed in range(60):
        step, expected = case.step(seed)
        pool.start(case.program, step)
        step.num_rows = 0  # the pool has its own copy
        if seed % 3 == 0:
            torch.randn(200, 200) @ torch.randn(200, 200)
        pool.wait()
        torch.testing.assert_close(case.rows[-1], expected)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_another_thread_may_wait(machine: Machine, num_threads: int) -> None:
    """A program should be whole when one thread starts it and another waits."""
    pool, case = machine.pools[num_threads], Doubling()
    for seed in range(5):
        step, expected = case.step(seed)
        pool.start(case.program, step)
        waiting = threading.Thread(target=pool.wait)
        waiting.start()
        waiting.join()
        torch.testing.assert_close(case.rows[-1], expected)


def test_others_should_compute_before_anyone_waits(machine: Machine) -> None:
    """With two threads a program should come to its end by itself, with one it should not begin."""
    for num_threads in (1, 2):
        pool, case = machine.pools[num_threads], Doubling()
        step, expected = case.step(1)
        pool.start(case.program, step)
        if num_threads == 2:
            wait_until(lambda rows=case.rows[-1]: not rows.isnan().any(), description="the program is done")  # type: ignore[misc]
            torch.testing.assert_close(case.rows[-1], expected)
        else:
            assert case.rows[1].isnan().all()
        pool.wait()
        torch.testing.assert_close(case.rows[-1], expected)


def test_programs_run_one_at_a_time(machine: Machine) -> None:
    """A second start before the wait, or a wait for nothing, is an error of ours."""
    pool, case = machine.pools[2], Doubling()
    with pytest.raises(AssertionError, match="nothing"):
        pool.wait()
    step, _ = case.step(1)
    pool.start(case.program, step)
    with pytest.raises(AssertionError, match="one program"):
        pool.start(case.program, step)
    pool.wait()


def test_a_pool_should_close_with_a_program_in_flight(machine: Machine) -> None:
    """What was started should be done before its threads end, and nothing wait forever."""
    pool, case = Pool(machine.library, 3), Doubling()
    step, expected = case.step(1)
    pool.start(case.program, step)
    pool.close()
    torch.testing.assert_close(case.rows[-1], expected)


def test_time_in_which_nobody_waited_should_be_no_op_s(machine: Machine) -> None:
    """Ops should be timed whoever runs them, to the end of the last one and no further."""
    pool, case = machine.pools[2], Doubling(num_ops=4)
    step, _ = case.step(1)
    since = time.monotonic()
    pool.start(case.program, step)
    wait_until(lambda: not case.rows[-1].isnan().any(), description="the program is done")
    elapsed_s = time.monotonic() - since
    threading.Event().wait(0.2)
    pool.wait()
    assert 0 < case.program.profile()["norm"] < elapsed_s + 0.1
