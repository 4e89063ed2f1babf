"""Processes as /proc shows them."""

from __future__ import annotations

import os
import subprocess
import sys

from quire.bench import processes
from quire.bench.processes import Usage


def test_a_tree_holds_children_and_their_memory() -> None:
    """A child should be in its parent's tree, with memory of its own, until it ends."""
    code = "import sys; print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:  # type: ignore[call-overload]
        child.stdout.readline()
        assert child.pid in processes.tree(os.getpid())
        assert processes.tree(child.pid) == [child.pid]
        assert 1 << 20 < processes.resident_bytes([child.pid]) < processes.resident_bytes([child.pid, os.getpid()])
        child.communicate()
    assert child.pid not in processes.tree(os.getpid())
    assert processes.tree(child.pid) == []
    assert processes.resident_bytes([child.pid]) == 0


def test_others_are_what_is_not_measured() -> None:
    """What the machine used less what the measured ones used, by time; never less than nothing."""
    before = Usage(at=10.0, machine_s=100.0, measured_s=50.0)
    assert processes.others_cores(before, Usage(at=12.0, machine_s=104.0, measured_s=53.0)) == 0.5
    assert processes.others_cores(before, Usage(at=12.0, machine_s=102.9, measured_s=53.0)) == 0.0


def test_usage_counts_this_process_once() -> None:
    """Naming this process again should not count it twice, and readings should never go back."""
    first, named = processes.usage([]), processes.usage([os.getpid()])
    assert named.measured_s - first.measured_s < 1.0
    assert named.machine_s >= first.machine_s > 0
