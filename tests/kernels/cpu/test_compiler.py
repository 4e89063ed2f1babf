"""A compiler lives no longer than who started it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from kernels.cpu.compiler import run_compiler
from tests.waiting import wait_until

STUBBORN = """#!/bin/sh
trap '' TERM
sleep 60 &
echo $! > {folder}/child
wait
"""
"""A compiler that starts another process and does not go when it is asked to."""
BUILD = """
import sys
from pathlib import Path
from kernels.cpu.build import Isa, build
build(Path(sys.argv[1]), Isa.AVX512)
"""


@contextmanager
def building(folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that compiles the kernels into `folder`."""
    process = subprocess.Popen([sys.executable, "-c", BUILD, str(folder)], env=os.environ | environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def programs(process: subprocess.Popen[bytes]) -> dict[int, str]:
    """What the process has started and what these have: their ids and names."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found[child.pid] = child.name()
    return found


def kill_and_watch(process: subprocess.Popen[bytes], awaited: str, *, timeout_s: float) -> None:
    """Kill -9 as soon as the program `awaited` runs below the process; nothing below it should run soon after."""
    wait_until(lambda: awaited in programs(process).values(), description=f"{awaited} runs")
    started = programs(process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(map(is_running, started)), description=f"{started} are gone", timeout_s=timeout_s)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not ended (what became an orphan may stay a zombie for long)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def make_compiler(folder: Path, script: str = STUBBORN) -> Path:
    """An executable named cc in a folder of its own."""
    path = folder / "bin" / "cc"
    path.parent.mkdir()
    path.write_text(script.format(folder=folder))
    path.chmod(0o755)
    return path


def test_a_compiler_should_die_with_a_killed_parent(tmp_path: Path) -> None:
    """After kill -9 of who compiles there should be neither cc nor what it had started, and no file of theirs."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to compile with")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with building(tmp_path / "cache", {"TMPDIR": str(temporary)}) as process:
        kill_and_watch(process, "cc1", timeout_s=2)
    assert list(temporary.iterdir()) == []


def test_a_stubborn_compiler_should_die_with_a_killed_parent(tmp_path: Path) -> None:
    """What does not end when it is asked to should be killed, a child of it, too."""
    compiler = make_compiler(tmp_path)
    path = f"{compiler.parent}{os.pathsep}{os.environ['PATH']}"
    with building(tmp_path / "cache", {"PATH": path}) as process:
        kill_and_watch(process, "sleep", timeout_s=10)


def test_a_compiler_that_takes_too_long_should_be_ended_with_its_children(tmp_path: Path) -> None:
    """After the time-out nothing of it should run."""
    compiler = make_compiler(tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        run_compiler([str(compiler)], timeout_s=1)
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not is_running(child), description="the compiler's child is gone", timeout_s=1)


@pytest.mark.parametrize("status", [0, 3])
def test_status_and_errors_should_be_the_compilers(tmp_path: Path, status: int) -> None:
    """Exit status, words and arguments with spaces should pass the guard unchanged; it should not wait for anything."""
    compiler = make_compiler(tmp_path, '#!/bin/sh\ncat\necho said\necho "$1|$2" >&2\nexit ' + str(status))
    since = time.monotonic()
    assert run_compiler([str(compiler), "a b", "$c"], timeout_s=60) == (status, "a b|$c\n")
    assert time.monotonic() - since < 30
