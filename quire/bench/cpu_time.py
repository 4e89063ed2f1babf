"""CPU time that processes have used, user and system, read from outside while they run. Linux only."""

from __future__ import annotations

from pathlib import Path

NS_PER_S = 1_000_000_000


def process_cpu_s(pid: int) -> float:
    """Seconds of CPU that all living threads of process `pid` have used.

    Raises:
        OSError: no such process, or a system without /proc/PID/task/TID/schedstat.
    """
    return sum(_thread_cpu_s(path) for path in Path(f"/proc/{pid}/task").iterdir())


def main_thread_cpu_s(pid: int) -> float:
    """The same for the thread that process `pid` began with: in our services the one of the event loop."""
    return _thread_cpu_s(Path(f"/proc/{pid}/task/{pid}"))


def other_threads_cpu_s(pid: int) -> float:
    """The same for all threads but that one."""
    return sum(_thread_cpu_s(path) for path in Path(f"/proc/{pid}/task").iterdir() if path.name != str(pid))


def _thread_cpu_s(task: Path) -> float:
    on_cpu_ns, _, _ = (task / "schedstat").read_text(encoding="ascii").split()
    return int(on_cpu_ns) / NS_PER_S
