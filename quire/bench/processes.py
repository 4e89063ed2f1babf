"""What processes use, read from /proc: the memory of a tree of them, and who else kept the processor busy."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SPOILED_CORES = 0.1
"""A measurement during which other processes used more than this many cores is spoiled."""

_IDLE_FIELDS = (3, 4)  # idle and iowait, of the "cpu" line of /proc/stat
_GUEST_FIELDS = (8, 9)  # counted in user and nice already


def tree(root: int) -> list[int]:
    """`root` and everything below it that lives now."""
    children: dict[int, list[int]] = {}
    for pid in map(int, filter(str.isdecimal, os.listdir(PROC))):
        fields = _stat(pid)
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(pid)
    found = [root] if _stat(root) is not None else []
    for pid in found:
        found += children.get(pid, [])
    return found


def resident_bytes(pids: Iterable[int]) -> int:
    """Memory in RAM of these processes; a page that several share counts once in all (PSS)."""
    return sum(_pss(pid) for pid in pids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Processor seconds so far: of the whole machine, and of the processes that are measured."""

    at: float
    machine_s: float
    measured_s: float


def usage(pids: Iterable[int]) -> Usage:
    """A reading for the processes `pids` and this one, what their dead children used included."""
    measured = sum(map(_cpu_s, {*pids, os.getpid()}))
    return Usage(at=time.monotonic(), machine_s=_machine_cpu_s(), measured_s=measured)


def others_cores(before: Usage, after: Usage) -> float:
    """Cores that all other processes kept busy between two readings, on average; what a hypervisor took counts, too."""
    others_s = (after.machine_s - before.machine_s) - (after.measured_s - before.measured_s)
    return max(0.0, others_s / max(after.at - before.at, 1e-9))


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat behind the name (state first); None when it has ended."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _cpu_s(pid: int) -> float:
    fields = _stat(pid)
    return 0.0 if fields is None else sum(map(int, fields[11:15])) / TICKS_PER_S


def _machine_cpu_s() -> float:
    line = (PROC / "stat").read_text(encoding="ascii").splitlines()[0]
    times = [int(field) for field in line.split()[1:]]
    skipped = {*_IDLE_FIELDS, *_GUEST_FIELDS}
    return sum(value for place, value in enumerate(times) if place not in skipped) / TICKS_PER_S


def _pss(pid: int) -> int:
    """Bytes; 0 when the process has ended or may not be looked at."""
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
