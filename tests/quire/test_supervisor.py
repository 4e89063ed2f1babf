"""The supervisor with real processes: small Python children that sleep, end or refuse."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from quire import supervisor as supervisor_module
from quire.supervisor import ChildSpec, Signals, StartFailed, Supervisor, describe_exit
from tests.waiting import wait_until

SLEEPER = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def make_spec(name: str, code: str, *arguments: str) -> ChildSpec:
    return ChildSpec(name=name, argv=(sys.executable, "-c", code, *arguments), environment=dict(os.environ))


@pytest.fixture
def signals() -> Iterator[Signals]:
    with Signals() as entered:
        yield entered


@pytest.fixture
def supervisor(signals: Signals) -> Iterator[Supervisor]:
    made = Supervisor(signals, lambda line: None, lambda: None)
    made.is_settled = True
    yield made
    made.stop([])


def wait_for(supervisor: Supervisor, condition: Callable[[], bool], description: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"not within 20 s: {description}"
        supervisor.wait(0.05)


def test_killed_child_is_started_again(supervisor: Supervisor) -> None:
    """A child that is killed should run again under another process id."""
    supervisor.start(make_spec("a", SLEEPER))
    first = supervisor.pids()["a"]
    os.kill(first, signal.SIGKILL)
    wait_for(supervisor, lambda: supervisor.pids().get("a", first) != first, "a new process")
    assert psutil.pid_exists(supervisor.pids()["a"])


def test_restarts_slow_down(signals: Signals) -> None:
    """A child that keeps dying should be started less and less often, and each death be told with its reason."""
    lines: list[str] = []
    supervisor = Supervisor(signals, lines.append, lambda: None)
    supervisor.is_settled = True
    supervisor.start(make_spec("a", "raise SystemExit(7)"))
    wait_for(supervisor, lambda: len(lines) >= 4, "four deaths")
    supervisor.stop([])
    assert [line.rpartition(" in ")[2] for line in lines[:4]] == ["0.1 s", "0.2 s", "0.4 s", "0.8 s"]
    assert "ended with exit code 7" in lines[0]


def test_a_child_that_keeps_dying_is_given_up(signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that gives up should do so for a row of deaths, not for as many between which the child lived."""
    monkeypatch.setattr(supervisor_module, "MAX_DEATHS_IN_ROW", 3)
    lines: list[str] = []
    supervisor = Supervisor(signals, lines.append, lambda: None)
    supervisor.is_settled = supervisor.gives_up = True
    supervisor.start(make_spec("a", "raise SystemExit(7)"))
    with pytest.raises(StartFailed, match=r"a keeps dying: .*exit code 7"):
        wait_for(supervisor, lambda: False, "the third death")
    assert len(lines) == 2
    supervisor.stop([])
    monkeypatch.setattr(supervisor_module, "STEADY_AFTER_S", 0.0)
    supervisor.start(make_spec("b", "raise SystemExit(7)"))
    wait_for(supervisor, lambda: len(lines) >= 6, "four deaths")
    supervisor.stop([])


def test_wrong_setting_ends_the_start(signals: Signals) -> None:
    """Exit code 2 before the cell was ready should end the start with 2, not be tried again."""
    supervisor = Supervisor(signals, lambda line: None, lambda: None)
    supervisor.start(make_spec("a", "raise SystemExit(2)"))
    with pytest.raises(StartFailed) as caught:
        wait_for(supervisor, lambda: False, "the refusal")
    supervisor.stop([])
    assert caught.value.exit_code == 2


def test_child_that_cannot_start_ends_the_start(signals: Signals) -> None:
    """A child that dies again and again before the cell was ready should end the start with 1."""
    supervisor = Supervisor(signals, lambda line: None, lambda: None)
    supervisor.start(make_spec("a", "raise SystemExit(9)"))
    with pytest.raises(StartFailed, match="exit code 9") as caught:
        wait_for(supervisor, lambda: False, "the third death")
    supervisor.stop([])
    assert caught.value.exit_code == 1


def test_child_that_cannot_be_run_is_tried_again(signals: Signals, tmp_path: Path) -> None:
    """When the machine refuses to run a child, the others should live on, and it be run once that is possible."""
    lines: list[str] = []
    supervisor = Supervisor(signals, lines.append, lambda: None)
    supervisor.is_settled = True
    program = tmp_path / "program"
    supervisor.start(ChildSpec(name="a", argv=(str(program),), environment=dict(os.environ)))
    wait_for(supervisor, lambda: len(lines) >= 2, "two tries")
    assert "could not be run: " in lines[0]
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o700)
    wait_for(supervisor, lambda: "a" in supervisor.pids(), "a process")
    supervisor.stop([])


def test_stop_goes_in_order_and_kills_what_does_not_end(signals: Signals, tmp_path: Path) -> None:
    """Groups should end one after another; a child that ignores SIGTERM should be killed after the grace time."""
    lines: list[str] = []
    supervisor = Supervisor(signals, lines.append, lambda: None)
    supervisor.is_settled = True
    record, ready = tmp_path / "ends", tmp_path / "ready"
    code = textwrap.dedent(f"""
        import signal, sys, time
        def end(*_):
            open({str(record)!r}, "a").write(sys.argv[1] + "\\n")
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        open({str(ready)!r}, "a").write("x")
        time.sleep(60)
    """)
    for name in ("worker", "gateway", "scheduler"):
        supervisor.start(make_spec(name, code, name))
    supervisor.start(
        make_spec("redis", STUBBORN.replace("print('up', flush=True)", f"open({str(ready)!r}, 'a').write('x')"))
    )
    wait_for(supervisor, lambda: ready.exists() and ready.read_text() == "xxxx", "all children to be up")
    pids = supervisor.pids()
    supervisor.stop([([name], 0.5) for name in ("gateway", "worker", "scheduler", "redis")])
    assert record.read_text().split() == ["gateway", "worker", "scheduler"]
    assert lines == ["redis: still at work after 0.5 s, killed"]
    assert [pid for pid in pids.values() if psutil.pid_exists(pid)] == []


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    """kill -9 of the supervising process should leave none of its children."""
    record = tmp_path / "pid"
    code = textwrap.dedent(f"""
        import os, sys
        from quire.supervisor import ChildSpec, Signals, Supervisor
        with Signals() as signals:
            supervisor = Supervisor(signals, print, lambda: None)
            argv = (sys.executable, "-c", {SLEEPER!r})
            supervisor.start(ChildSpec(name="a", argv=argv, environment=dict(os.environ)))
            open({str(record)!r}, "w").write(str(supervisor.pids()["a"]) + ";")
            while True:
                supervisor.wait()
    """)
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(lambda: record.exists() and record.read_text().endswith(";"), description="the child's start")
        child = psutil.Process(int(record.read_text()[:-1]))
    finally:
        parent.kill()
        parent.wait()
    gone, alive = psutil.wait_procs([child], timeout=10)
    assert (len(gone), alive) == (1, [])


def test_grandchildren_do_not_outlive_a_dead_child(supervisor: Supervisor, tmp_path: Path) -> None:
    """What a dead child had started should be killed with it."""
    record = tmp_path / "pid"
    code = f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]);" + (
        f"open({str(record)!r}, 'w').write(f'{{p.pid}};'); time.sleep(60)"
    )
    supervisor.start(make_spec("a", code))
    wait_for(supervisor, lambda: record.exists() and record.read_text().endswith(";"), "the grandchild")
    grandchild = psutil.Process(int(record.read_text()[:-1]))
    first = supervisor.pids()["a"]
    os.kill(first, signal.SIGKILL)
    wait_for(supervisor, lambda: not grandchild.is_running() or grandchild.status() == "zombie", "its death")


def test_a_retired_child_ends_and_stays_away(supervisor: Supervisor) -> None:
    """A child told to leave should end by itself while the others run on, and its name be free again; its death before
    that is no reason to start it again."""
    for name in ("a", "b"):
        supervisor.start(make_spec(name, SLEEPER))
    others = supervisor.pids()["b"]
    supervisor.retire("a", 20.0)
    assert supervisor.staying() == ["b"]
    assert supervisor.names() == ["a", "b"]
    wait_for(supervisor, lambda: supervisor.names() == ["b"], "the end of a")
    supervisor.start(make_spec("a", SLEEPER))
    assert supervisor.staying() == ["b", "a"]
    assert supervisor.pids()["b"] == others


def test_a_retired_child_that_does_not_end_is_killed(signals: Signals) -> None:
    """After its time a child that ignores SIGTERM should be killed, and that be told; nobody waits for it meanwhile."""
    lines: list[str] = []
    supervisor = Supervisor(signals, lines.append, lambda: None)
    supervisor.is_settled = True
    supervisor.start(
        make_spec("a", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)")
    )
    pid = supervisor.pids()["a"]
    wait_for(supervisor, lambda: _ignores(pid, signal.SIGTERM), "a to ignore SIGTERM")
    supervisor.retire("a", 0.2)
    assert supervisor.pids() == {"a": pid}
    wait_for(supervisor, lambda: supervisor.names() == [], "the end of a")
    assert lines == [f"a (pid {pid}) was told to leave: still at work, killed"]
    assert not psutil.pid_exists(pid)


def test_a_retired_child_is_stopped_with_all_others(supervisor: Supervisor) -> None:
    """A stop of everything while one is leaving should take that one, too."""
    supervisor.start(make_spec("a", STUBBORN))
    pid = supervisor.pids()["a"]
    supervisor.retire("a", 60.0)
    supervisor.stop([(supervisor.names(), 0.1)])
    assert not psutil.pid_exists(pid)


def _ignores(pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = [int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:")]
    return bool(mask >> (number - 1) & 1)


def test_stop_signals_are_counted(signals: Signals) -> None:
    """SIGINT, SIGTERM and SIGHUP should each wake `wait` and count as a stop."""
    for count, number in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), 1):
        os.kill(os.getpid(), number)
        signals.wait(5)
        assert signals.num_stops == count


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "ended with exit code 0"), (-9, "was killed by SIGKILL"), (-63, "was killed by signal 63")],
)
def test_exits_are_described_in_words(code: int, words: str) -> None:
    """Return codes should read as a person would say them."""
    assert describe_exit(code) == words
