"""`quire bench table`: a real cell, measured; and what it leaves behind when it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from quire.bench import table
from quire.bench.random_model import write_random_model
from quire.bench.served import ServedModel
from shared.errors import QuireError
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache with the test model in it."""
    folder = tmp_path_factory.mktemp("cache")
    write_random_model("test", folder / "bench" / "test")
    return str(folder)


def test_quick_run_measures_shows_and_writes(
    cache_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command should start a cell, measure it, print the table and write JSON and plot."""
    assert table.main(["--quick", f"--cache-dir={cache_dir}", f"--out={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    assert "| w1 time per output token, test-bf16 |" in shown
    (figures,) = tmp_path.glob("table-*.json")
    document = json.loads(figures.read_text())
    result = document["results"]["test-bf16"]
    assert [repeat["output_tokens"] for repeat in result["workloads"]["w1"]["repeats"]] == [128]
    assert result["workloads"]["w1"]["others_cores"] >= 0
    assert result["memory_beyond_bytes"] > 50e6
    taken = result["memory_weight_bytes"] + result["memory_kv_bytes"]
    assert result["memory_beyond_bytes"] == result["memory_resident_bytes"] - taken
    assert result["start_s"] > 0
    assert len(document["rows"]) == 3
    (plot,) = tmp_path.glob("table-*.svg")
    ElementTree.parse(plot)


def test_a_peer_is_measured_beside_ours(cache_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any OpenAI-style server should get the same workload, and columns of its own with the ratio."""
    with ServedModel(Path(cache_dir, "bench", "test")) as peer:
        flags = [f"--peer-url={peer.url}", "--peer-as=test-bf16", "--peer-model=test", f"--peer-pid={peer.pids[0]}"]
        assert table.main(["--quick", f"--cache-dir={cache_dir}", f"--out={tmp_path}", *flags]) == 0
    assert "| peer in this run | ours / peer |" in capsys.readouterr().out
    (figures,) = tmp_path.glob("table-*.json")
    document = json.loads(figures.read_text())
    ours, theirs = (document["results"]["test-bf16"][whose]["w1"]["median"] for whose in ("workloads", "peer"))
    assert document["rows"][0]["ours"] == ours["tpot_ms_p50"]
    assert document["rows"][0]["peer_in_this_run"] == theirs["tpot_ms_p50"] > 0


def test_a_configuration_without_its_workload_is_left_out_with_its_reason() -> None:
    """A configuration for which nothing that it is for was chosen should be told, and be no failure."""
    settings = table.TableConfig(workload=("w1", "w2"))
    result = table._measure_or_tell(table.CONFIGURATIONS["q05b-bf16-cached"], settings)
    assert result == {"left_out": "w3 only"}
    assert not table._has_failed(result)


def test_a_cell_that_cannot_start_tells_why(tmp_path: Path) -> None:
    """The error should hold what `quire serve` said, not only that it ended."""
    with pytest.raises(QuireError, match=r"(?s)ended with 2.*no such folder"), ServedModel(tmp_path / "nothing"):
        pass


@dataclass(frozen=True, slots=True)
class Moment:
    """When to stop a measurement: once it has said `line`, and runs `num_processes` (in all: launcher, Redis,
    scheduler, worker, gateway)."""

    line: str
    num_processes: int


MEASURING = Moment("w1 1/", 5)
STARTING = [pytest.param(Moment("bench: test-bf16: starting", count), marks=pytest.mark.slow) for count in (1, 3)]


@pytest.mark.parametrize("moment", [MEASURING, *STARTING], ids=str)
def test_stopping_leaves_no_process(cache_dir: str, tmp_path: Path, moment: Moment) -> None:
    """Ctrl-C should end every process that was started, remove what was written, and exit with 130."""
    with _running(cache_dir, tmp_path, moment) as (process, children, temporary):
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        _, left = psutil.wait_procs(children, timeout=10)
        assert left == []
        assert list(temporary.iterdir()) == []


def test_a_launcher_that_has_just_begun_dies_too(cache_dir: str) -> None:
    """kill -9 in the very moment in which the launcher is there should end it, before it could ask for that itself."""
    script = (
        "import os, pathlib, psutil, signal, sys, threading\n"
        "from quire.bench.served import ServedModel\n"
        "def die_with_a_child():\n"
        "    while not (children := psutil.Process().children()): pass\n"
        "    print(children[0].pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "threading.Thread(target=die_with_a_child).start()\n"
        "with ServedModel(pathlib.Path(sys.argv[1]), (f'--data-dir={sys.argv[2]}',)): pass\n"
    )
    command = [sys.executable, "-c", script, str(Path(cache_dir, "bench", "test"))]
    with tempfile.TemporaryDirectory(prefix="qt-") as temporary:
        ended = subprocess.run(
            [*command, f"{temporary}/data"],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": temporary},
            check=False,
        )
        assert ended.returncode == -signal.SIGKILL
        launcher = int(ended.stdout)
        try:
            wait_until(lambda: not psutil.pid_exists(launcher), description="the launcher's end", timeout_s=10)
        finally:
            if psutil.pid_exists(launcher):
                os.kill(launcher, signal.SIGTERM)


@pytest.mark.slow
def test_a_killed_measurement_leaves_no_process(cache_dir: str, tmp_path: Path) -> None:
    """Even kill -9 should end everything that was started."""
    with _running(cache_dir, tmp_path, MEASURING) as (process, children, _):
        process.kill()
        _, left = psutil.wait_procs(children, timeout=20)
        assert left == []


@contextmanager
def _running(
    cache_dir: str, out: Path, moment: Moment
) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process], Path]]:
    """A measurement that takes for ever, at `moment`; all that it has started; its folder for temporary files."""
    command = [sys.executable, "-m", "quire", "bench", "table", "--configuration=test-bf16", "--workload=w1"]
    command += ["--repeats=1000000", f"--cache-dir={cache_dir}", f"--out={out}"]
    if moment is not MEASURING:
        command.append("--quick")
    # A short folder of their own (it holds a socket): what kill -9 leaves there goes with it.
    with (
        tempfile.TemporaryDirectory(prefix="qt-") as temporary,
        _heeding_interrupts(),
        subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"TMPDIR": temporary},
        ) as process,
    ):
        assert process.stderr is not None
        try:
            next(line for line in process.stderr if line.startswith(moment.line))
            measurement = psutil.Process(process.pid)
            wait_until(lambda: len(measurement.children(recursive=True)) >= moment.num_processes, description="a cell")
            children = measurement.children(recursive=True)
            yield process, children, Path(temporary)
        except subprocess.TimeoutExpired as error:
            logs = [path.read_text(errors="replace")[-4000:] for path in Path(temporary).glob("*/cell.log")]
            states = [f"{child.pid} {child.name()} {child.status()}" for child in children if child.is_running()]
            raise AssertionError("\n".join([str(error), *states, *logs])) from None
        finally:
            process.kill()
            process.stderr.close()


@contextmanager
def _heeding_interrupts() -> Iterator[None]:
    """Within, children begin with the default for SIGINT. A background job of a shell without job control ignores it,
    and so would all that the job starts: these tests could not stop what they measure when they run as one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
